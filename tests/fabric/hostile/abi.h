/* The part of libfabric's binary interface that a library needs which crossrail loads, declared by hand from its manual
 * pages, as versions 1.17 to 2.6 lay it out for 64-bit processors. abi_check.c compares it with the installed headers.
 * It shares nothing with crates/fabric/src/raw.rs on purpose: a slip in either shows as a failed test. */
#ifndef HOSTILE_ABI_H
#define HOSTILE_ABI_H

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

#define FI_VERSION(major, minor) (((uint32_t)(major) << 16) | (uint32_t)(minor))

/* capabilities, and flags of operations and completions */
#define FI_MSG (1ULL << 1)
#define FI_RMA (1ULL << 2)
#define FI_TAGGED (1ULL << 3)
#define FI_ATOMIC (1ULL << 4)
#define FI_READ (1ULL << 8)
#define FI_WRITE (1ULL << 9)
#define FI_RECV (1ULL << 10)
#define FI_TRANSMIT (1ULL << 11)
#define FI_REMOTE_READ (1ULL << 12)
#define FI_REMOTE_WRITE (1ULL << 13)
#define FI_REMOTE_CQ_DATA (1ULL << 17)
#define FI_MORE (1ULL << 18)
#define FI_COMPLETION (1ULL << 24)
#define FI_INJECT (1ULL << 25)
#define FI_INJECT_COMPLETE (1ULL << 26)
#define FI_TRANSMIT_COMPLETE (1ULL << 27)
#define FI_DELIVERY_COMPLETE (1ULL << 28)
#define FI_HMEM (1ULL << 47)
#define FI_LOCAL_COMM (1ULL << 51)
#define FI_REMOTE_COMM (1ULL << 52)
#define FI_NUMERICHOST (1ULL << 55)
#define FI_SOURCE (1ULL << 57)
#define FI_SELECTIVE_COMPLETION (1ULL << 59)
/* modes */
#define FI_CONTEXT (1ULL << 59)
#define FI_CONTEXT2 (1ULL << 52)
#define FI_RX_CQ_DATA (1ULL << 56)
/* mr_mode */
#define FI_MR_LOCAL (1 << 2)
#define FI_MR_VIRT_ADDR (1 << 4)
#define FI_MR_ALLOCATED (1 << 5)
#define FI_MR_PROV_KEY (1 << 6)
#define FI_MR_ENDPOINT (1 << 9)
#define FI_MR_HMEM (1 << 10)

#define FI_ORDER_NONE 0ULL
#define FI_ADDR_NOTAVAIL UINT64_MAX
#define FI_KEY_NOTAVAIL UINT64_MAX

enum { FI_CLASS_FABRIC = 1, FI_CLASS_DOMAIN = 2, FI_CLASS_EP = 3, FI_CLASS_AV = 11, FI_CLASS_MR = 12, FI_CLASS_EQ = 13,
       FI_CLASS_CQ = 14, FI_CLASS_NIC = 20 };
enum { FI_EP_MSG = 1, FI_EP_DGRAM = 2, FI_EP_RDM = 3 };
enum { FI_AV_UNSPEC, FI_AV_MAP, FI_AV_TABLE };
enum { FI_PROGRESS_UNSPEC, FI_PROGRESS_AUTO, FI_PROGRESS_MANUAL };
enum { FI_THREAD_UNSPEC, FI_THREAD_SAFE, FI_THREAD_FID, FI_THREAD_DOMAIN };
enum { FI_CQ_FORMAT_UNSPEC, FI_CQ_FORMAT_CONTEXT, FI_CQ_FORMAT_MSG, FI_CQ_FORMAT_DATA };
enum { FI_WAIT_NONE, FI_WAIT_UNSPEC, FI_WAIT_SET, FI_WAIT_FD };
enum { FI_GETWAIT = 5, FI_ENABLE = 6 };
enum { FI_LINK_UNKNOWN, FI_LINK_DOWN, FI_LINK_UP };
enum { FI_BUS_PCI = 1 };
enum { FI_HMEM_SYSTEM, FI_HMEM_CUDA };
enum { FI_SOCKADDR_IN = 2, FI_ADDR_STR = 9, FI_ADDR_EFA = 12 };
enum { FI_ETOOSMALL = 257, FI_EOPBADSTATE = 258, FI_EAVAIL = 259, FI_ENOEQ = 261, FI_ENOCQ = 263, FI_ENOKEY = 266 };

typedef uint64_t fi_addr_t;
struct fid;
struct fid_fabric;
struct fid_domain;
struct fid_ep;
struct fid_av;
struct fid_cq;
struct fid_eq;
struct fid_mr;
typedef void (*unused_fn)(void);

struct fi_ops {
    size_t size;
    int (*close)(struct fid *);
    int (*bind)(struct fid *, struct fid *, uint64_t flags);
    int (*control)(struct fid *, int command, void *);
    int (*ops_open)(struct fid *, const char *, uint64_t, void **, void *);
    unused_fn tostr, ops_set;
};
struct fid { size_t fclass; void *context; struct fi_ops *ops; };

struct fi_tx_attr {
    uint64_t caps, mode, op_flags, msg_order, comp_order;
    size_t inject_size, size, iov_limit, rma_iov_limit;
    uint32_t tclass;
};
struct fi_rx_attr {
    uint64_t caps, mode, op_flags, msg_order, comp_order;
    size_t total_buffered_recv, size, iov_limit;
};
struct fi_ep_attr {
    int type;
    uint32_t protocol, protocol_version;
    size_t max_msg_size, msg_prefix_size, max_order_raw_size, max_order_war_size, max_order_waw_size;
    uint64_t mem_tag_format;
    size_t tx_ctx_cnt, rx_ctx_cnt, auth_key_size;
    uint8_t *auth_key;
};
struct fi_domain_attr {
    struct fid_domain *domain;
    char *name;
    int threading, control_progress, data_progress, resource_mgmt, av_type, mr_mode;
    size_t mr_key_size, cq_data_size, cq_cnt, ep_cnt, tx_ctx_cnt, rx_ctx_cnt, max_ep_tx_ctx, max_ep_rx_ctx, max_ep_stx_ctx,
        max_ep_srx_ctx, cntr_cnt, mr_iov_limit;
    uint64_t caps, mode;
    uint8_t *auth_key;
    size_t auth_key_size, max_err_data, mr_cnt;
    uint32_t tclass;
};
struct fi_fabric_attr { struct fid_fabric *fabric; char *name, *prov_name; uint32_t prov_version, api_version; };
struct fi_info {
    struct fi_info *next;
    uint64_t caps, mode;
    uint32_t addr_format;
    size_t src_addrlen, dest_addrlen;
    void *src_addr, *dest_addr;
    struct fid *handle;
    struct fi_tx_attr *tx_attr;
    struct fi_rx_attr *rx_attr;
    struct fi_ep_attr *ep_attr;
    struct fi_domain_attr *domain_attr;
    struct fi_fabric_attr *fabric_attr;
    struct fid_nic *nic;
};
struct fi_device_attr { char *name, *device_id, *device_version, *vendor_id, *driver, *firmware; };
struct fi_pci_attr { uint16_t domain_id; uint8_t bus_id, device_id, function_id; };
struct fi_bus_attr { int bus_type; struct fi_pci_attr pci; };
struct fi_link_attr { char *address; size_t mtu, speed; int state; char *network_type; };
struct fid_nic {
    struct fid fid;
    struct fi_device_attr *device_attr;
    struct fi_bus_attr *bus_attr;
    struct fi_link_attr *link_attr;
    void *prov_attr;
};

struct fi_eq_attr { size_t size; uint64_t flags; int wait_obj, signaling_vector; void *wait_set; };
struct fi_av_attr { int type, rx_ctx_bits; size_t count, ep_per_node; const char *name; void *map_addr; uint64_t flags; };
struct fi_cq_attr { size_t size; uint64_t flags; int format, wait_obj, signaling_vector, wait_cond; void *wait_set; };
struct fi_mr_attr {
    const struct iovec *mr_iov;
    size_t iov_count;
    uint64_t access, offset, requested_key;
    void *context;
    size_t auth_key_size;
    uint8_t *auth_key;
    int iface;
    uint64_t device;
};
struct fi_rma_iov { uint64_t addr; size_t len; uint64_t key; };
struct fi_msg_rma {
    const struct iovec *msg_iov;
    void **desc;
    size_t iov_count;
    fi_addr_t addr;
    const struct fi_rma_iov *rma_iov;
    size_t rma_iov_count;
    void *context;
    uint64_t data;
};
struct fi_cq_data_entry { void *op_context; uint64_t flags; size_t len; void *buf; uint64_t data; };
struct fi_cq_err_entry {
    void *op_context;
    uint64_t flags;
    size_t len;
    void *buf;
    uint64_t data, tag;
    size_t olen;
    int err, prov_errno;
    void *err_data;
    size_t err_data_size;
    fi_addr_t src_addr; /* written for interface 1.20 and later only */
};
struct fi_eq_err_entry {
    struct fid *fid;
    void *context;
    uint64_t data;
    int err, prov_errno;
    void *err_data;
    size_t err_data_size;
};

struct fi_ops_fabric {
    size_t size;
    int (*domain)(struct fid_fabric *, struct fi_info *, struct fid_domain **, void *context);
    unused_fn passive_ep;
    int (*eq_open)(struct fid_fabric *, struct fi_eq_attr *, struct fid_eq **, void *context);
    unused_fn wait_open;
    int (*trywait)(struct fid_fabric *, struct fid **, int count);
    unused_fn domain2;
};
struct fi_ops_domain {
    size_t size;
    int (*av_open)(struct fid_domain *, struct fi_av_attr *, struct fid_av **, void *context);
    int (*cq_open)(struct fid_domain *, struct fi_cq_attr *, struct fid_cq **, void *context);
    int (*endpoint)(struct fid_domain *, struct fi_info *, struct fid_ep **, void *context);
    unused_fn scalable_ep, cntr_open, poll_open, stx_ctx, srx_ctx, query_atomic, query_collective, endpoint2;
};
struct fi_ops_mr {
    size_t size;
    int (*reg)(struct fid *, const void *, size_t len, uint64_t access, uint64_t offset, uint64_t key, uint64_t flags,
               struct fid_mr **, void *context);
    int (*regv)(struct fid *, const struct iovec *, size_t count, uint64_t access, uint64_t offset, uint64_t key,
                uint64_t flags, struct fid_mr **, void *context);
    int (*regattr)(struct fid *, const struct fi_mr_attr *, uint64_t flags, struct fid_mr **);
};
struct fi_ops_ep {
    size_t size;
    ssize_t (*cancel)(struct fid *, void *context);
    int (*getopt)(struct fid *, int level, int name, void *, size_t *len);
    int (*setopt)(struct fid *, int level, int name, const void *, size_t len);
    unused_fn tx_ctx, rx_ctx, rx_size_left, tx_size_left;
};
struct fi_ops_cm {
    size_t size;
    int (*setname)(struct fid *, void *, size_t);
    int (*getname)(struct fid *, void *, size_t *len);
    unused_fn getpeer, connect, listen, accept, reject, shutdown, join;
};
struct fi_ops_msg {
    size_t size;
    ssize_t (*recv)(struct fid_ep *, void *, size_t len, void *desc, fi_addr_t, void *context);
    unused_fn recvv, recvmsg, send, sendv, sendmsg, inject, senddata, injectdata;
};
struct fi_ops_rma {
    size_t size;
    unused_fn read, readv, readmsg;
    ssize_t (*write)(struct fid_ep *, const void *, size_t len, void *desc, fi_addr_t, uint64_t at, uint64_t key,
                     void *context);
    ssize_t (*writev)(struct fid_ep *, const struct iovec *, void **desc, size_t count, fi_addr_t, uint64_t at,
                      uint64_t key, void *context);
    ssize_t (*writemsg)(struct fid_ep *, const struct fi_msg_rma *, uint64_t flags);
    ssize_t (*inject)(struct fid_ep *, const void *, size_t len, fi_addr_t, uint64_t at, uint64_t key);
    ssize_t (*writedata)(struct fid_ep *, const void *, size_t len, void *desc, uint64_t data, fi_addr_t, uint64_t at,
                         uint64_t key, void *context);
    ssize_t (*injectdata)(struct fid_ep *, const void *, size_t len, uint64_t data, fi_addr_t, uint64_t at, uint64_t key);
};
struct fi_ops_av {
    size_t size;
    int (*insert)(struct fid_av *, const void *, size_t count, fi_addr_t *, uint64_t flags, void *context);
    unused_fn insertsvc, insertsym;
    int (*remove)(struct fid_av *, fi_addr_t *, size_t count, uint64_t flags);
    int (*lookup)(struct fid_av *, fi_addr_t, void *, size_t *len);
    const char *(*straddr)(struct fid_av *, const void *, char *, size_t *len);
    unused_fn av_set;
};
struct fi_ops_cq {
    size_t size;
    ssize_t (*read)(struct fid_cq *, void *, size_t count);
    unused_fn readfrom;
    ssize_t (*readerr)(struct fid_cq *, struct fi_cq_err_entry *, uint64_t flags);
    unused_fn sread, sreadfrom, signal;
    const char *(*strerror)(struct fid_cq *, int prov_errno, const void *err_data, char *, size_t len);
};
struct fi_ops_eq {
    size_t size;
    ssize_t (*read)(struct fid_eq *, uint32_t *event, void *, size_t len, uint64_t flags);
    ssize_t (*readerr)(struct fid_eq *, struct fi_eq_err_entry *, uint64_t flags);
    unused_fn write, sread;
    const char *(*strerror)(struct fid_eq *, int prov_errno, const void *err_data, char *, size_t len);
};

struct fid_fabric { struct fid fid; struct fi_ops_fabric *ops; uint32_t api_version; };
struct fid_domain { struct fid fid; struct fi_ops_domain *ops; struct fi_ops_mr *mr; };
struct fid_mr { struct fid fid; void *mem_desc; uint64_t key; };
struct fid_ep {
    struct fid fid;
    struct fi_ops_ep *ops;
    struct fi_ops_cm *cm;
    struct fi_ops_msg *msg;
    struct fi_ops_rma *rma;
    void *tagged, *atomic, *collective;
};
struct fid_av { struct fid fid; struct fi_ops_av *ops; };
struct fid_cq { struct fid fid; struct fi_ops_cq *ops; };
struct fid_eq { struct fid fid; struct fi_ops_eq *ops; };

int fi_getinfo(uint32_t version, const char *node, const char *service, uint64_t flags, const struct fi_info *hints,
               struct fi_info **info);
void fi_freeinfo(struct fi_info *info);
struct fi_info *fi_dupinfo(const struct fi_info *info);
int fi_fabric(struct fi_fabric_attr *attr, struct fid_fabric **fabric, void *context);
const char *fi_strerror(int error);
uint32_t fi_version(void);

#endif
