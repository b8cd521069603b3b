"""Output of other programs, as they print it, for the tests of what is read from it."""

# ruff: noqa: E501

IPERF3 = """{
 "start": {"version": "iperf 3.12", "system_info": "Linux node7",
  "test_start": {"protocol": "TCP", "num_streams": 2, "blksize": 131072}},
 "intervals": [
  {"sum": {"bits_per_second": 24000000000.0}},
  {"sum": {"bits_per_second": 16000000000.0}}],
 "end": {
  "streams": [
   {"sender": {"bytes": 3000000000, "retransmits": 7},
    "receiver": {"bytes": 3000000000, "bits_per_second": 12000000000.0}},
   {"sender": {"bytes": 1000000000, "retransmits": 0},
    "receiver": {"bytes": 1000000000, "bits_per_second": 4000000000.0}}],
  "sum_sent": {"bytes": 4000000000, "bits_per_second": 16000000000.0, "seconds": 2.0},
  "sum_received": {"bytes": 4000000000, "bits_per_second": 16000000000.0, "seconds": 2.0}}}
"""

NCCL_JSON = """{"version": 1, "args": ["./build/all_reduce_perf", "-g", "2"], "nccl_version": 22703,
 "results": [
  {"size": 1024, "out_of_place": {"time": 12.5, "alg_bw": 0.08, "bus_bw": 0.08, "nwrong": 0}, "in_place": null},
  {"size": 1048576, "out_of_place": null, "in_place": {"time": 50.0, "alg_bw": 20.97, "bus_bw": 20.97, "nwrong": 0}}]}
"""

NCCL_TEXT = """# nThread 1 nGpus 2 minBytes 1024 maxBytes 2048 step: 2(factor) (all_gather_perf)
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
        1024           256     float    none      -1    11.25    0.09    0.05      0    11.30    0.09    0.05      0
     1048576        262144     float    none      -1    45.12   23.24   11.62      0    44.90   23.35   11.68    N/A
# Avg bus bandwidth    : 5.8
"""

UCX_TABLE = """| API:          protocol layer                                                                 |
| Test:         tag match latency                                                              |
| Message size: 8                                                                              |
+--------------+--------------+------------------------------+---------------------+-----------------------+
|    Stage     | # iterations | 50.0%ile | average | overall |  average |  overall |  average  |  overall  |
[thread 0]              3730      6.549   134.561   134.561        0.06       0.06        7432        7432
Final:                 20000      6.554    50.547    98.623        0.15       0.08       19784       10140
"""

UCX_CSV = """iterations,50.0_percentile_lat,avg_lat,overall_lat,avg_bw,overall_bw,avg_mr,overall_mr
2000,4.915,297.936,297.936,6400.00,6400.00,102400,102400
"""

OSU_LATENCY = """# OSU MPI Latency Test v7.3
# Size          Latency (us)
1                       0.95
8                       0.97
"""

OSU_BANDWIDTH = """# OSU MPI Bandwidth Test v7.3
# Size      Bandwidth (MB/s)
65536              9500.25
1048576           11000.00
"""

OSU_COLLECTIVE = """# OSU MPI Allreduce Latency Test v7.3
# Size       Avg Latency(us)   Min Latency(us)   Max Latency(us)  Iterations
4                       2.10              1.90              2.40        1000
1048576               456.00            440.00            470.00         100
"""

NIXLBENCH = """Block Size (B)      Batch Size     B/W (GB/Sec)   Avg Lat. (us)  P99 Prep (us)  Avg Tx (us)    P99 Tx (us)
--------------------------------------------------------------------------------
4096                1              0.512000       8.0            20.0           7.0            9.5
65536               4              12.500000      21.0           20.0           18.0           25.5
"""

DEEPEP_LOW_LATENCY = """Allocating buffer size: 2115.111296 MB ...
[rank 1] Dispatch + combine bandwidth: 27.38 GB/s, avg_t=805.34 us, min_t=795.87 us, max_t=819.01 us
[rank 0] Dispatch + combine bandwidth: 27.40 GB/s, avg_t=804.66 us, min_t=791.81 us, max_t=820.42 us
[rank 0] Dispatch bandwidth: 11.44 GB/s, avg_t=656.50 us | Combine bandwidth: 35.01 GB/s, avg_t=415.20 us
[rank 1] Dispatch bandwidth: 11.27 GB/s, avg_t=666.50 us | Combine bandwidth: 35.11 GB/s, avg_t=415.40 us
"""

DEEPEP_TUNING = """[tuning] SMs 24, NVL chunk 4: 210.00 GB/s (NVL), 580.00 us
[tuning] Best dispatch (FP8): SMs 24, NVL chunk 16, 240.46 GB/s (NVL), t: 505.12 us
[tuning] Best combine: SMs 24, NVL chunk 8, RDMA chunk 16: 20.50 + 900.00 us, 60.00 GB/s (RDMA), 195.77 GB/s (NVL)
"""

DEEPEP_ELASTIC = """   * EP:   0/  2 | dispatch: 0 GB/s (SO), 300 GB/s (SU), 20.500 us, 6000000 bytes | copy: 900 GB/s, 5.000 us
   * EP:   1/  2 | dispatch: 0 GB/s (SO), 310 GB/s (SU), 19.500 us, 6000000 bytes | copy: 910 GB/s, 5.100 us
   * EP:   0/  2 | combine: 0 GB/s (SO), 200 GB/s (SU), 30.500 us, 6000000 bytes | reduce: 900 GB/s, 5.000 us
"""

OSU_TWO_TESTS = """# OSU MPI Latency Test v5.8
# Size          Latency (us)
1                       1.10
8                       1.12
1024                    2.05

# OSU MPI Bandwidth Test v5.8
# Size      Bandwidth (MB/s)
1                       1.53
1024                 1262.07
4194304              1785.15
"""

OSU_TWICE = """With UCX 1.11.2
# OSU MPI Bi-Directional Bandwidth Test v5.8
# Size      Bandwidth (MB/s)
1                       1.35
1048576             19095.27

With UCX 1.12
# OSU MPI Bi-Directional Bandwidth Test v5.8
# Size      Bandwidth (MB/s)
1                       1.49
1048576             9012.50
"""

OSU_CHECKED = """# OSU MPI Latency Test v7.3
# Size          Latency (us)        Validation
1                       0.95              Pass
8                       0.97              Fail
"""

NCCL_TWO_TESTS = """+ ./build/all_reduce_perf -b 1M -e 1M
# nThread 1 nGpus 1 minBytes 256 maxBytes 512 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1 graph: 0
#
# Using devices
#  Rank  0 Group  0 Pid 1478709 on      gpu23 device  0 [0x31] NVIDIA A40
#  Rank  1 Group  0 Pid 1171742 on      gpu24 device  0 [0x31] NVIDIA A40
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
     1048576        262144     float     sum      -1    50.00   20.97   20.97      0    50.10   20.93   20.93      0
# Avg bus bandwidth    : 20.95
+ ./build/alltoall_perf -b 1M -e 1M
# nThread 1 nGpus 1 minBytes 256 maxBytes 512 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1 graph: 0
#
# Using devices
#  Rank  0 Group  0 Pid 1478709 on      gpu23 device  0 [0x31] NVIDIA A40
#  Rank  1 Group  0 Pid 1171742 on      gpu24 device  0 [0x31] NVIDIA A40
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
     1048576        131072     float    none      -1   200.00    5.24    2.62      0   201.00    5.22    2.61    N/A
# Avg bus bandwidth    : 2.6
"""

NCCL_WITHOUT_ROOT = """#       size         count      type   redop     time   algbw   busbw  error     time   algbw   busbw  error
        1024           256     float     sum    19.18    0.05    0.08  0e+00    19.30    0.05    0.08  0e+00
"""

NIXLBENCH_TWICE = """### unenable progress thread result ###
----------------------------------------------------------------------------------------------------------------------------------------------------------------
Block Size (B)      Batch Size     B/W (GB/Sec)   Avg Lat. (us)  Avg Prep (us)  P99 Prep (us)  Avg Post (us)  P99 Post (us)  Avg Tx (us)    P99 Tx (us)
----------------------------------------------------------------------------------------------------------------------------------------------------------------
4096                1              0.500000       8.1          492.5          1440.0         103.6          338.0          397.6          3844.0

### enable progress thread result ###
----------------------------------------------------------------------------------------------------------------------------------------------------------------
Block Size (B)      Batch Size     B/W (GB/Sec)   Avg Lat. (us)  Avg Prep (us)  P99 Prep (us)  Avg Post (us)  P99 Post (us)  Avg Tx (us)    P99 Tx (us)
----------------------------------------------------------------------------------------------------------------------------------------------------------------
4096                1              0.027182       602.8          492.5          1440.0         103.6          338.0          397.6          3844.0
"""

IPERF3_BOTH_WAYS = """{"start": {"connected": [], "version": "iperf 3.19.1", "system_info": "Linux x", "test_start": {"protocol": "TCP", "num_streams": 1, "blksize": 131072, "omit": 0, "duration": 2, "reverse": 0, "bidir": 1}}, "intervals": [{"streams": [], "sum": {"start": 0, "end": 2, "seconds": 2, "bytes": 10000000000, "bits_per_second": 40000000000.0, "retransmits": 3, "sender": true}, "sum_bidir_reverse": {"start": 0, "end": 2, "seconds": 2, "bytes": 4000000000, "bits_per_second": 16000000000.0, "retransmits": 3, "sender": false}}], "end": {"streams": [{"sender": {"socket": 5, "start": 0, "end": 2, "seconds": 2, "bytes": 10000000000, "bits_per_second": 40000000000.0, "retransmits": 3, "sender": true}, "receiver": {"socket": 5, "start": 0, "end": 2, "seconds": 2, "bytes": 10000000000, "bits_per_second": 40000000000.0, "sender": true}}, {"sender": {"socket": 5, "start": 0, "end": 2, "seconds": 2, "bytes": 4000000000, "bits_per_second": 16000000000.0, "retransmits": 0, "sender": false}, "receiver": {"socket": 5, "start": 0, "end": 2, "seconds": 2, "bytes": 4000000000, "bits_per_second": 16000000000.0, "sender": false}}], "sum_sent": {"start": 0, "end": 2, "seconds": 2, "bytes": 10000000000, "bits_per_second": 40000000000.0, "retransmits": 3, "sender": true}, "sum_received": {"start": 0, "end": 2, "seconds": 2, "bytes": 10000000000, "bits_per_second": 40000000000.0, "retransmits": 3, "sender": true}, "sum_sent_bidir_reverse": {"start": 0, "end": 2, "seconds": 2, "bytes": 4000000000, "bits_per_second": 16000000000.0, "retransmits": 3, "sender": false}, "sum_received_bidir_reverse": {"start": 0, "end": 2, "seconds": 2, "bytes": 4000000000, "bits_per_second": 16000000000.0, "retransmits": 3, "sender": false}}}
"""

IPERF3_EVENTS = """{"event": "start", "data": {"connected": [], "version": "iperf 3.19.1", "system_info": "Linux x", "test_start": {"protocol": "TCP", "num_streams": 1, "blksize": 131072, "omit": 0, "duration": 2, "reverse": 0, "bidir": 0}}}
{"event": "interval", "data": {"streams": [], "sum": {"start": 0, "end": 2, "seconds": 2, "bytes": 10000000000, "bits_per_second": 40000000000.0, "retransmits": 3, "sender": true}}}
{"event": "end", "data": {"streams": [{"sender": {"socket": 5, "start": 0, "end": 2, "seconds": 2, "bytes": 10000000000, "bits_per_second": 40000000000.0, "retransmits": 3, "sender": true}, "receiver": {"socket": 5, "start": 0, "end": 2, "seconds": 2, "bytes": 10000000000, "bits_per_second": 40000000000.0, "sender": true}}], "sum_sent": {"start": 0, "end": 2, "seconds": 2, "bytes": 10000000000, "bits_per_second": 40000000000.0, "retransmits": 3, "sender": true}, "sum_received": {"start": 0, "end": 2, "seconds": 2, "bytes": 9750000000, "bits_per_second": 39000000000.0, "retransmits": 3, "sender": true}}}
"""

RCCL_LINES = """{"#wrong":"0","algBw":0.053,"busBw":0.08,"gpus":4,"inPlace":0,"name":"AllReduce","redop":"sum","size":1024,"time":19.18,"type":"float"}
{"#wrong":"0","algBw":0.053,"busBw":0.08,"gpus":4,"inPlace":0,"name":"AllReduce","redop":"sum","size":1024,"time":19.18,"type":"float"}
"""
