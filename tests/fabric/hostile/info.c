/* fi_getinfo: what each provider offers, and what it demands in return. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hostile.h"

/* Attributes grow at their end from version to version: what follows ours is not zero. */
#define LATER 64

/* Modelled on what the providers of those names demand. `mr_optional`: bits that the seed adds. */
static const struct provider PROVIDERS[] = {
    { .name = "tcp", .device = "tcp", .mr_optional = 0, .protocol = 25, .addr_format = FI_SOCKADDR_IN, .manual = true,
      .may_wait = true },
    { .name = "shm", .device = "shm", .mr_mode = FI_MR_VIRT_ADDR, .protocol = 16, .addr_format = FI_ADDR_STR,
      .manual = true },
    { .name = "efa", .device = "rdmap%us6-rdm", .protocol = 20, .addr_format = FI_ADDR_EFA, .nic = true, .manual = true,
      .mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY, .closes_fence = true },
    { .name = "efa", .device = "rdmap%us6-dgrm", .mode = FI_CONTEXT2, .protocol = 1020, .addr_format = FI_ADDR_EFA,
      .mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY, .nic = true, .introduces = true,
      .narrow = true, .closes_fence = true, .datagrams = true },
    { .name = "efa-direct", .device = "rdmap%us6-rdm", .mode = FI_CONTEXT2, .protocol = 21, .addr_format = FI_ADDR_EFA,
      .mr_mode = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY, .nic = true, .introduces = true,
      .narrow = true, .closes_fence = true },
    { .name = "cxi", .device = "cxi%u", .mr_mode = FI_MR_ENDPOINT | FI_MR_ALLOCATED, .mr_optional = FI_MR_PROV_KEY,
      .protocol = 24, .addr_format = FI_ADDR_STR, .nic = true, .manual = true, .may_wait = true, .closes_fence = true },
    { .name = "verbs;ofi_rxm", .device = "mlx5_%u", .mr_optional = FI_MR_LOCAL, .mode = 0, .protocol = 11,
      .mr_mode = FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY, .addr_format = FI_SOCKADDR_IN, .nic = true,
      .manual = true, .may_wait = true, .closes_fence = true },
    /* Of no kind: the seed decides what it demands and does. */
    { .name = "hostile", .device = "hostile%u", .mr_optional = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_PROV_KEY,
      .protocol = 77, .addr_format = FI_ADDR_STR, .nic = true, .manual = true, .may_wait = true },
};
#define PROVIDER_COUNT (sizeof PROVIDERS / sizeof *PROVIDERS)

static void *zeroed(size_t len)
{
    void *made = calloc(1, len + LATER);
    if (!made)
        abort();
    return made;
}

static void *grown(size_t len)
{
    char *made = zeroed(len);
    memset(made + len, 0xa5, LATER);
    return made;
}

static char *copied(const char *text) { return text ? strdup(text) : NULL; }

static struct fi_info *allocated(void)
{
    struct fi_info *info = zeroed(sizeof *info);
    info->tx_attr = zeroed(sizeof *info->tx_attr);
    info->rx_attr = zeroed(sizeof *info->rx_attr);
    info->ep_attr = zeroed(sizeof *info->ep_attr);
    info->domain_attr = zeroed(sizeof *info->domain_attr);
    info->fabric_attr = zeroed(sizeof *info->fabric_attr);
    return info;
}

static void free_nic(struct fid_nic *nic)
{
    if (!nic)
        return;
    free(nic->device_attr->name);
    free(nic->device_attr->driver);
    free(nic->device_attr);
    free(nic->bus_attr);
    free(nic->link_attr->address);
    free(nic->link_attr->network_type);
    free(nic->link_attr);
    free(nic);
}

static void free_info(struct fi_info *info)
{
    for (struct fi_info *next; info; info = next) {
        next = info->next;
        free(info->src_addr);
        free(info->dest_addr);
        free(info->tx_attr);
        free(info->rx_attr);
        free(info->ep_attr);
        if (info->domain_attr)
            free(info->domain_attr->name);
        free(info->domain_attr);
        if (info->fabric_attr) {
            free(info->fabric_attr->name);
            free(info->fabric_attr->prov_name);
        }
        free(info->fabric_attr);
        free_nic(info->nic);
        free(info);
    }
}

static struct fid_nic *nic_of(unsigned number, const char *device, const char *type)
{
    struct fid_nic *nic = grown(sizeof *nic);
    nic->fid.fclass = FI_CLASS_NIC;
    nic->device_attr = grown(sizeof *nic->device_attr);
    nic->device_attr->name = copied(device);
    nic->device_attr->driver = copied("hostile");
    nic->bus_attr = grown(sizeof *nic->bus_attr);
    nic->bus_attr->bus_type = FI_BUS_PCI;
    nic->bus_attr->pci = (struct fi_pci_attr){ 0, (uint8_t)(0x10 + number), 0, 0 };
    nic->link_attr = grown(sizeof *nic->link_attr);
    nic->link_attr->address = copied("fe80::1");
    nic->link_attr->mtu = 8760;
    nic->link_attr->speed = 400000000000;
    nic->link_attr->state = FI_LINK_UP;
    nic->link_attr->network_type = copied(type);
    return nic;
}

static struct fi_info *offer(const struct provider *provider, unsigned number, const char *node, uint32_t version)
{
    char device[64];
    struct fi_info *info = zeroed(sizeof *info);
    info->tx_attr = grown(sizeof *info->tx_attr);
    info->rx_attr = grown(sizeof *info->rx_attr);
    info->ep_attr = grown(sizeof *info->ep_attr);
    info->domain_attr = grown(sizeof *info->domain_attr);
    info->fabric_attr = grown(sizeof *info->fabric_attr);
    if (provider->nic)
        snprintf(device, sizeof device, provider->device, number);
    else
        snprintf(device, sizeof device, "%s%s%s", provider->device, node ? "-" : "", node ? node : "");
    info->caps = FI_MSG | FI_RMA | FI_WRITE | FI_REMOTE_WRITE | FI_RECV | FI_TRANSMIT | FI_LOCAL_COMM | FI_REMOTE_COMM;
    if (config.hmem && (provider->nic || !strcmp(provider->name, "shm")))
        info->caps |= FI_HMEM;
    info->mode = provider->mode;
    if (provider->narrow && roll(2))
        info->mode |= FI_RX_CQ_DATA;
    info->addr_format = provider->addr_format;
    if (provider->addr_format == FI_SOCKADDR_IN) {
        struct sockaddr_in *at = zeroed(sizeof *at);
        at->sin_family = AF_INET;
        inet_pton(AF_INET, node ? node : "127.0.0.1", &at->sin_addr);
        info->src_addr = at;
        info->src_addrlen = sizeof *at;
    }
    info->tx_attr->caps = info->rx_attr->caps = info->caps;
    info->tx_attr->mode = info->rx_attr->mode = info->mode;
    info->tx_attr->inject_size = config.inject;
    info->tx_attr->size = info->rx_attr->size = config.tx;
    info->tx_attr->iov_limit = info->rx_attr->iov_limit = config.iov;
    info->tx_attr->rma_iov_limit = provider->narrow ? 1 : config.rma_iov;
    info->ep_attr->type = provider->datagrams ? FI_EP_DGRAM : FI_EP_RDM;
    info->ep_attr->protocol = provider->protocol;
    info->ep_attr->protocol_version = 1;
    info->ep_attr->max_msg_size = config.msg;
    info->ep_attr->tx_ctx_cnt = info->ep_attr->rx_ctx_cnt = 1;
    struct fi_domain_attr *domain = info->domain_attr;
    domain->name = copied(device);
    domain->threading = FI_THREAD_DOMAIN;
    domain->control_progress = domain->data_progress = provider->manual ? FI_PROGRESS_MANUAL : FI_PROGRESS_AUTO;
    domain->resource_mgmt = 1;
    domain->av_type = config.map ? FI_AV_MAP : FI_AV_TABLE;
    domain->mr_mode = (int)(provider->mr_mode | (config.mr_mode & provider->mr_optional));
    domain->mr_key_size = config.key_size;
    domain->cq_data_size = config.data;
    domain->cq_cnt = domain->ep_cnt = TABLE_MAX;
    domain->mr_iov_limit = 1;
    domain->mr_cnt = config.mrs;
    info->fabric_attr->name = copied(provider->nic ? provider->name : device);
    info->fabric_attr->prov_name = copied(provider->name);
    info->fabric_attr->prov_version = config.version;
    info->fabric_attr->api_version = version;
    if (provider->nic)
        info->nic = nic_of(number, device, strcmp(provider->name, "verbs;ofi_rxm") ? provider->name : "InfiniBand");
    return info;
}

/* Compares an offer with the hints, and withdraws capabilities that were not asked for. */
static bool suits(const struct fi_info *hints, struct fi_info *info)
{
    if (!hints)
        return true;
    uint64_t asked = hints->caps;
    if (asked & ~info->caps || info->mode & ~hints->mode)
        return false;
    if (hints->fabric_attr && hints->fabric_attr->prov_name
        && strcasecmp(hints->fabric_attr->prov_name, info->fabric_attr->prov_name))
        return false;
    if (hints->ep_attr && hints->ep_attr->type && hints->ep_attr->type != info->ep_attr->type)
        return false;
    if (hints->ep_attr && hints->ep_attr->max_msg_size > info->ep_attr->max_msg_size)
        return false;
    if (hints->tx_attr && (hints->tx_attr->msg_order || hints->tx_attr->inject_size > info->tx_attr->inject_size
                           || hints->tx_attr->size > info->tx_attr->size
                           || hints->tx_attr->op_flags & FI_DELIVERY_COMPLETE))
        return false;
    const struct fi_domain_attr *wanted = hints->domain_attr;
    if (!wanted)
        return info->domain_attr->mr_mode == 0;
    if (info->domain_attr->mr_mode & ~wanted->mr_mode || wanted->cq_data_size > info->domain_attr->cq_data_size)
        return false;
    if (wanted->name && strcmp(wanted->name, info->domain_attr->name))
        return false;
    if (wanted->threading == FI_THREAD_SAFE)
        info->domain_attr->threading = FI_THREAD_SAFE;
    if (wanted->data_progress == FI_PROGRESS_AUTO && info->domain_attr->data_progress == FI_PROGRESS_MANUAL)
        return false;
    if (wanted->av_type && wanted->av_type != FI_AV_UNSPEC)
        info->domain_attr->av_type = wanted->av_type;
    /* Capabilities that were not asked for are not granted. */
    if (asked)
        info->caps = info->tx_attr->caps = info->rx_attr->caps = asked;
    return true;
}

int fi_getinfo(uint32_t version, const char *node, const char *service, uint64_t flags, const struct fi_info *hints,
               struct fi_info **info)
{
    (void)service;
    if (node && !(flags & FI_SOURCE))
        return -ENODATA;
    lock_all();
    if (version > config.version) {
        unlock_all();
        return -ENOSYS;
    }
    struct fi_info *made[PROVIDER_COUNT * 8];
    unsigned count = 0;
    for (size_t i = 0; i < PROVIDER_COUNT; i++) {
        const struct provider *provider = &PROVIDERS[i];
        /* A numeric address is none of a NIC that has no network interface. */
        if (node && provider->addr_format != FI_SOCKADDR_IN)
            continue;
        for (unsigned nic = 0; nic < (provider->nic ? config.nics : 1); nic++) {
            struct fi_info *one = offer(provider, nic, node, version);
            if (suits(hints, one))
                made[count++] = one;
            else
                free_info(one);
        }
    }
    for (unsigned i = count; i > 1; i--) {
        unsigned other = (unsigned)roll(i);
        struct fi_info *swapped = made[i - 1];
        made[i - 1] = made[other];
        made[other] = swapped;
    }
    for (unsigned i = 0; i + 1 < count; i++)
        made[i]->next = made[i + 1];
    *info = count ? made[0] : NULL;
    infos_out += count;
    unlock_all();
    return count ? 0 : -ENODATA;
}

void fi_freeinfo(struct fi_info *info)
{
    lock_all();
    for (struct fi_info *one = info; one; one = one->next)
        infos_out--;
    free_info(info);
    unlock_all();
}

#define COPY(field) do { if (info->field) memcpy(made->field, info->field, sizeof *info->field); } while (0)

struct fi_info *fi_dupinfo(const struct fi_info *info)
{
    struct fi_info *made = allocated();
    lock_all();
    infos_out++;
    unlock_all();
    if (!info)
        return made;
    made->caps = info->caps;
    made->mode = info->mode;
    made->addr_format = info->addr_format;
    made->src_addrlen = info->src_addrlen;
    if (info->src_addr)
        made->src_addr = memcpy(zeroed(info->src_addrlen), info->src_addr, info->src_addrlen);
    COPY(tx_attr);
    COPY(rx_attr);
    COPY(ep_attr);
    COPY(domain_attr);
    COPY(fabric_attr);
    made->domain_attr->name = copied(info->domain_attr ? info->domain_attr->name : NULL);
    made->fabric_attr->name = copied(info->fabric_attr ? info->fabric_attr->name : NULL);
    made->fabric_attr->prov_name = copied(info->fabric_attr ? info->fabric_attr->prov_name : NULL);
    if (info->nic)
        made->nic = nic_of(info->nic->bus_attr->pci.bus_id - 0x10U, info->nic->device_attr->name,
                           info->nic->link_attr->network_type);
    return made;
}

const struct provider *provider_of(const struct fi_info *info)
{
    for (size_t i = 0; i < PROVIDER_COUNT; i++)
        if (PROVIDERS[i].protocol == info->ep_attr->protocol)
            return &PROVIDERS[i];
    return NULL;
}

const char *fi_strerror(int error)
{
    switch (error < 0 ? -error : error) {
    case FI_EAVAIL: return "Error available";
    case FI_ETOOSMALL: return "Provided buffer is too small";
    case FI_EOPBADSTATE: return "Operation not permitted in current state";
    case FI_ENOKEY: return "Required key not available";
    default: return strerror(error < 0 ? -error : error);
    }
}

uint32_t fi_version(void) { return (uint32_t)config.version; }
