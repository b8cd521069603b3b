// One rank of two: NCCL's device API over GIN proxy. An all-to-all that is checked, then put + signal latency (half a round trip)
// and bandwidth (one way, a window of puts, then one signal), by kernels. JSON lines.
//   nvcc -std=c++17 -arch=sm_90 -I$NCCL_HOME/include gin.cu -o gin -L$NCCL_HOME/lib -lnccl -Xlinker -rpath=$NCCL_HOME/lib
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <unistd.h>
#include <vector>
#include <algorithm>
#include <cuda_runtime.h>
#include "nccl.h"
#include "nccl_device.h"

#define CHECK(call) do { auto status = (call); if (status) { printf("%s: error %d at line %d\n", #call, (int)status, __LINE__); exit(1); } } while (0)

__global__ void exchange(ncclWindow_t from, ncclWindow_t to, size_t bytes, ncclDevComm comm) {
  ncclGin gin{comm, 0};
  uint64_t before = gin.readSignal(0);
  ncclGinBarrierSession<ncclCoopCta> bar{ncclCoopCta(), gin, ncclTeamTagWorld(), 0};
  bar.sync(ncclCoopCta(), cuda::memory_order_acquire, ncclGinFenceLevel::None);
  if (threadIdx.x < comm.nRanks) {
    gin.put(ncclTeamWorld(comm), threadIdx.x, to, comm.rank * bytes, from, threadIdx.x * bytes, bytes, ncclGin_StrongSignalInc{0});
  }
  gin.waitSignal(ncclCoopCta(), 0, before + comm.nRanks);
  gin.flush(ncclCoopCta());
  bar.sync(ncclCoopCta(), cuda::memory_order_release, ncclGinFenceLevel::None);
}

// Ping-pong of a put with a signal.
__global__ void pingpong(ncclWindow_t from, ncclWindow_t to, size_t bytes, int rounds, ncclDevComm comm) {
  ncclGin gin{comm, 0};
  uint64_t value = gin.readSignal(1);
  int peer = 1 - comm.rank;
  for (int round = 0; round < rounds; ++round) {
    if (comm.rank == 0) {
      if (threadIdx.x == 0) gin.put(ncclTeamWorld(comm), peer, to, 0, from, 0, bytes, ncclGin_StrongSignalInc{1});
      gin.waitSignal(ncclCoopCta(), 1, ++value);
    } else {
      gin.waitSignal(ncclCoopCta(), 1, ++value);
      if (threadIdx.x == 0) gin.put(ncclTeamWorld(comm), peer, to, 0, from, 0, bytes, ncclGin_StrongSignalInc{1});
    }
    __syncthreads();
  }
  gin.flush(ncclCoopCta());
}

// Rank 0 puts a window of pieces and signals; rank 1 answers with a signal.
__global__ void stream(ncclWindow_t from, ncclWindow_t to, size_t bytes, int pieces, int rounds, ncclDevComm comm) {
  ncclGin gin{comm, 0};
  uint64_t value = gin.readSignal(2);
  int peer = 1 - comm.rank;
  for (int round = 0; round < rounds; ++round) {
    if (comm.rank == 0) {
      if (threadIdx.x == 0) {
        for (int piece = 0; piece < pieces; ++piece) {
          if (piece + 1 < pieces) gin.put(ncclTeamWorld(comm), peer, to, piece * bytes, from, piece * bytes, bytes);
          else gin.put(ncclTeamWorld(comm), peer, to, piece * bytes, from, piece * bytes, bytes, ncclGin_StrongSignalInc{2});
        }
      }
      gin.waitSignal(ncclCoopCta(), 2, ++value);
    } else {
      gin.waitSignal(ncclCoopCta(), 2, ++value);
      if (threadIdx.x == 0) gin.signal(ncclTeamWorld(comm), peer, ncclGin_StrongSignalInc{2});
    }
    __syncthreads();
  }
  gin.flush(ncclCoopCta());
}

int main() {
  int rank = atoi(getenv("RANK"));
  std::string path = std::string(getenv("STORE")) + "/id";
  CHECK(cudaSetDevice(0));
  ncclUniqueId id;
  if (rank == 0) {
    CHECK(ncclGetUniqueId(&id));
    FILE* file = fopen((path + ".new").c_str(), "w");
    fwrite(&id, sizeof id, 1, file); fclose(file);
    rename((path + ".new").c_str(), path.c_str());
  } else {
    FILE* file = nullptr;
    for (int tries = 0; !file && tries < 600; ++tries) { file = fopen(path.c_str(), "r"); if (!file) usleep(50000); }
    if (!file || fread(&id, sizeof id, 1, file) != 1) { printf("no id\n"); return 1; }
  }
  ncclComm_t comm;
  CHECK(ncclCommInitRank(&comm, 2, id, rank));
  ncclCommProperties_t props = NCCL_COMM_PROPERTIES_INITIALIZER;
  CHECK(ncclCommQueryProperties(comm, &props));
  if (rank == 0) printf("{\"device_api\": %d, \"gin_type\": %d}\n", (int)props.deviceApiSupport, (int)props.ginType);
  if (!props.deviceApiSupport || props.ginType == NCCL_GIN_TYPE_NONE) return 1;
  const size_t room = 64 << 20;
  void *a, *b; ncclWindow_t from, to;
  CHECK(ncclMemAlloc(&a, room)); CHECK(ncclMemAlloc(&b, room));
  CHECK(ncclCommWindowRegister(comm, a, room, &from, NCCL_WIN_COLL_SYMMETRIC));
  CHECK(ncclCommWindowRegister(comm, b, room, &to, NCCL_WIN_COLL_SYMMETRIC));
  ncclDevComm dev;
  ncclDevCommRequirements reqs = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
  reqs.worldGinBarrierCount = 1; reqs.ginSignalCount = 4; reqs.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
  CHECK(ncclDevCommCreate(comm, &reqs, &dev));
  cudaStream_t s; CHECK(cudaStreamCreate(&s));
  cudaEvent_t e0, e1; cudaEventCreate(&e0); cudaEventCreate(&e1);
  for (size_t bytes : {(size_t)8, (size_t)4096, (size_t)1000003, (size_t)(16 << 20)}) {
    std::vector<unsigned char> sent(2 * bytes), got(2 * bytes);
    for (size_t at = 0; at < sent.size(); ++at) sent[at] = (unsigned char)(at * 31 + rank * 7 + at / bytes);
    CHECK(cudaMemcpy(a, sent.data(), sent.size(), cudaMemcpyHostToDevice));
    CHECK(cudaMemset(b, 0xee, sent.size()));
    exchange<<<1, 64, 0, s>>>(from, to, bytes, dev);
    CHECK(cudaStreamSynchronize(s));
    CHECK(cudaMemcpy(got.data(), b, got.size(), cudaMemcpyDeviceToHost));
    for (size_t at = 0; at < got.size(); ++at) {
      size_t source = at / bytes, in = rank * bytes + at % bytes;
      if (got[at] != (unsigned char)(in * 31 + source * 7 + in / bytes)) { printf("byte %zu of %zu differs\n", at, bytes); return 1; }
    }
    if (rank == 0) printf("{\"what\": \"alltoall\", \"bytes\": %zu, \"data\": \"right\"}\n", bytes);
  }
  auto timed = [&](auto launch) {
    float ms = 0;
    launch(); CHECK(cudaStreamSynchronize(s));
    CHECK(cudaEventRecord(e0, s)); launch(); CHECK(cudaEventRecord(e1, s)); CHECK(cudaStreamSynchronize(s));
    CHECK(cudaEventElapsedTime(&ms, e0, e1));
    return ms * 1e3;
  };
  for (size_t bytes : {(size_t)8, (size_t)64, (size_t)4096, (size_t)65536, (size_t)(1 << 20)}) {
    int rounds = bytes > 65536 ? 50 : 300;
    double us = timed([&] { pingpong<<<1, 32, 0, s>>>(from, to, bytes, rounds, dev); }) / rounds / 2;
    if (rank == 0) printf("{\"what\": \"put_signal_latency\", \"bytes\": %zu, \"us\": %.2f}\n", bytes, us);
    fflush(stdout);
  }
  for (size_t bytes : {(size_t)4096, (size_t)16384, (size_t)65536, (size_t)(1 << 20)}) {
    int pieces = 48, rounds = 20;
    double us = timed([&] { stream<<<1, 32, 0, s>>>(from, to, bytes, pieces, rounds, dev); }) / rounds;
    if (rank == 0) printf("{\"what\": \"put_bandwidth\", \"bytes\": %zu, \"window\": %d, \"gb_per_s\": %.3f}\n", bytes, pieces, bytes * pieces / us / 1e3);
    fflush(stdout);
  }
  CHECK(ncclDevCommDestroy(comm, &dev));
  CHECK(ncclCommWindowDeregister(comm, from)); CHECK(ncclCommWindowDeregister(comm, to));
  CHECK(ncclMemFree(a)); CHECK(ncclMemFree(b));
  CHECK(ncclCommFinalize(comm)); CHECK(ncclCommDestroy(comm));
  if (rank == 0) printf("{\"what\": \"over\"}\n");
}
