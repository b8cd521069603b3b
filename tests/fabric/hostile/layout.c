/* Prints where each member of the interface is: with -DINSTALLED as the installed headers have it, else as abi.h does. */
#ifdef INSTALLED
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#define PCI attr.pci
#else
#include "abi.h"
#define PCI pci
#endif
#include <stdio.h>

#define AT(type, member) printf(#type "." #member " %zu\n", offsetof(struct type, member))
#define NUMBER(name) printf(#name " %llx\n", (unsigned long long)(name))

int main(void)
{
    AT(fi_info, caps); AT(fi_info, mode); AT(fi_info, addr_format); AT(fi_info, src_addrlen); AT(fi_info, src_addr);
    AT(fi_info, tx_attr); AT(fi_info, rx_attr); AT(fi_info, ep_attr); AT(fi_info, domain_attr); AT(fi_info, fabric_attr);
    AT(fi_info, nic);
    AT(fi_tx_attr, mode); AT(fi_tx_attr, op_flags); AT(fi_tx_attr, msg_order); AT(fi_tx_attr, inject_size);
    AT(fi_tx_attr, size); AT(fi_tx_attr, iov_limit); AT(fi_tx_attr, rma_iov_limit);
    AT(fi_rx_attr, mode); AT(fi_rx_attr, size); AT(fi_rx_attr, iov_limit);
    AT(fi_ep_attr, type); AT(fi_ep_attr, protocol); AT(fi_ep_attr, max_msg_size); AT(fi_ep_attr, tx_ctx_cnt);
    AT(fi_domain_attr, name); AT(fi_domain_attr, threading); AT(fi_domain_attr, data_progress);
    AT(fi_domain_attr, av_type); AT(fi_domain_attr, mr_mode); AT(fi_domain_attr, mr_key_size);
    AT(fi_domain_attr, cq_data_size); AT(fi_domain_attr, cq_cnt); AT(fi_domain_attr, mr_iov_limit);
    AT(fi_domain_attr, mr_cnt);
    AT(fi_fabric_attr, name); AT(fi_fabric_attr, prov_name); AT(fi_fabric_attr, api_version);
    AT(fid_nic, device_attr); AT(fid_nic, bus_attr); AT(fid_nic, link_attr);
    AT(fi_device_attr, name); AT(fi_device_attr, driver); AT(fi_bus_attr, bus_type); AT(fi_bus_attr, PCI);
    AT(fi_pci_attr, bus_id);
    AT(fi_link_attr, address); AT(fi_link_attr, mtu); AT(fi_link_attr, speed); AT(fi_link_attr, state);
    AT(fi_link_attr, network_type);
    AT(fid, fclass); AT(fid, context); AT(fid, ops);
    AT(fi_ops, close); AT(fi_ops, bind); AT(fi_ops, control); AT(fi_ops, ops_open);
    AT(fid_fabric, ops); AT(fid_fabric, api_version); AT(fid_domain, ops); AT(fid_domain, mr);
    AT(fid_mr, mem_desc); AT(fid_mr, key); AT(fid_ep, ops); AT(fid_ep, cm); AT(fid_ep, msg); AT(fid_ep, rma);
    AT(fid_av, ops); AT(fid_cq, ops); AT(fid_eq, ops);
    AT(fi_ops_fabric, domain); AT(fi_ops_fabric, eq_open); AT(fi_ops_fabric, trywait); AT(fi_ops_fabric, domain2);
    AT(fi_ops_domain, av_open); AT(fi_ops_domain, cq_open); AT(fi_ops_domain, endpoint); AT(fi_ops_domain, scalable_ep);
    AT(fi_ops_mr, reg); AT(fi_ops_mr, regv); AT(fi_ops_mr, regattr);
    AT(fi_ops_ep, cancel); AT(fi_ops_ep, getopt); AT(fi_ops_ep, setopt); AT(fi_ops_ep, tx_ctx);
    AT(fi_ops_cm, setname); AT(fi_ops_cm, getname); AT(fi_ops_cm, getpeer);
    AT(fi_ops_msg, recv); AT(fi_ops_msg, recvv);
    AT(fi_ops_rma, read); AT(fi_ops_rma, write); AT(fi_ops_rma, writev); AT(fi_ops_rma, writemsg);
    AT(fi_ops_rma, inject); AT(fi_ops_rma, writedata); AT(fi_ops_rma, injectdata);
    AT(fi_ops_av, insert); AT(fi_ops_av, remove); AT(fi_ops_av, lookup); AT(fi_ops_av, straddr); AT(fi_ops_av, av_set);
    AT(fi_ops_cq, read); AT(fi_ops_cq, readerr); AT(fi_ops_cq, strerror);
    AT(fi_ops_eq, read); AT(fi_ops_eq, readerr); AT(fi_ops_eq, strerror);
    AT(fi_eq_attr, size); AT(fi_eq_attr, wait_obj); AT(fi_av_attr, type); AT(fi_av_attr, count); AT(fi_av_attr, flags);
    AT(fi_cq_attr, size); AT(fi_cq_attr, format); AT(fi_cq_attr, wait_obj); AT(fi_cq_attr, wait_set);
    AT(fi_mr_attr, mr_iov); AT(fi_mr_attr, access); AT(fi_mr_attr, offset); AT(fi_mr_attr, requested_key);
    AT(fi_mr_attr, context); AT(fi_mr_attr, iface); AT(fi_mr_attr, device);
    AT(fi_rma_iov, addr); AT(fi_rma_iov, len); AT(fi_rma_iov, key);
    AT(fi_msg_rma, msg_iov); AT(fi_msg_rma, desc); AT(fi_msg_rma, iov_count); AT(fi_msg_rma, addr);
    AT(fi_msg_rma, rma_iov); AT(fi_msg_rma, rma_iov_count); AT(fi_msg_rma, context); AT(fi_msg_rma, data);
    AT(fi_cq_data_entry, flags); AT(fi_cq_data_entry, len); AT(fi_cq_data_entry, buf); AT(fi_cq_data_entry, data);
    AT(fi_cq_err_entry, data); AT(fi_cq_err_entry, olen); AT(fi_cq_err_entry, err); AT(fi_cq_err_entry, prov_errno);
    AT(fi_cq_err_entry, err_data); AT(fi_cq_err_entry, err_data_size);
    AT(fi_eq_err_entry, err); AT(fi_eq_err_entry, prov_errno); AT(fi_eq_err_entry, err_data);
    NUMBER(FI_MSG); NUMBER(FI_RMA); NUMBER(FI_WRITE); NUMBER(FI_RECV); NUMBER(FI_TRANSMIT); NUMBER(FI_REMOTE_WRITE);
    NUMBER(FI_REMOTE_CQ_DATA); NUMBER(FI_MORE); NUMBER(FI_COMPLETION); NUMBER(FI_INJECT); NUMBER(FI_INJECT_COMPLETE);
    NUMBER(FI_TRANSMIT_COMPLETE); NUMBER(FI_DELIVERY_COMPLETE); NUMBER(FI_HMEM); NUMBER(FI_LOCAL_COMM);
    NUMBER(FI_REMOTE_COMM); NUMBER(FI_NUMERICHOST); NUMBER(FI_SOURCE); NUMBER(FI_SELECTIVE_COMPLETION);
    NUMBER(FI_CONTEXT); NUMBER(FI_CONTEXT2); NUMBER(FI_RX_CQ_DATA); NUMBER(FI_MR_LOCAL); NUMBER(FI_MR_VIRT_ADDR);
    NUMBER(FI_MR_ALLOCATED); NUMBER(FI_MR_PROV_KEY); NUMBER(FI_MR_ENDPOINT); NUMBER(FI_MR_HMEM);
    NUMBER(FI_CLASS_FABRIC); NUMBER(FI_CLASS_DOMAIN); NUMBER(FI_CLASS_EP); NUMBER(FI_CLASS_AV); NUMBER(FI_CLASS_MR);
    NUMBER(FI_CLASS_EQ); NUMBER(FI_CLASS_CQ); NUMBER(FI_CLASS_NIC); NUMBER(FI_EP_RDM); NUMBER(FI_EP_DGRAM);
    NUMBER(FI_AV_MAP); NUMBER(FI_AV_TABLE); NUMBER(FI_PROGRESS_AUTO); NUMBER(FI_PROGRESS_MANUAL); NUMBER(FI_THREAD_SAFE);
    NUMBER(FI_THREAD_DOMAIN); NUMBER(FI_CQ_FORMAT_DATA); NUMBER(FI_WAIT_NONE); NUMBER(FI_WAIT_FD); NUMBER(FI_GETWAIT);
    NUMBER(FI_ENABLE); NUMBER(FI_LINK_UP); NUMBER(FI_LINK_DOWN); NUMBER(FI_BUS_PCI); NUMBER(FI_HMEM_CUDA);
    NUMBER(FI_SOCKADDR_IN); NUMBER(FI_ADDR_STR); NUMBER(FI_ADDR_EFA); NUMBER(FI_ETOOSMALL); NUMBER(FI_EOPBADSTATE);
    NUMBER(FI_EAVAIL); NUMBER(FI_ENOCQ); NUMBER(FI_ENOKEY);
    return 0;
}
