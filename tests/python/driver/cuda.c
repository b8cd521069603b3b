// A CUDA driver without a GPU: its memory is the host's, its kernels do nothing, and everything is done at once. It counts
// the calls that operations make, for test_driver_calls.py.
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

typedef unsigned Code;
typedef unsigned long long Address;
typedef void *Handle;

enum { MOST_ALLOCATIONS = 4096 };
static const Handle CONTEXT = (Handle)0x1000, DISPATCH = (Handle)0x2000, COMBINE = (Handle)0x3000;
static const Code INVALID = 1;
static struct {
    Address begin;
    size_t length;
} allocations[MOST_ALLOCATIONS];
static int allocated;

// Counts by name, read by the test.
unsigned long long calls_push, calls_pop, calls_current, calls_owner, calls_capturing, calls_mode, calls_wait, calls_record,
    calls_query, calls_launch, calls_early;

// Whether streams are being captured, set by the test.
int in_capture;

// From offsets.cpp.
extern const size_t at_tokens, at_host_word, at_count_word, at_host_words, bytes_of_dispatch, bytes_of_combine;

// Arguments of the last dispatch and of the last combine, read by the test.
unsigned char last_dispatch[1 << 12], last_combine[1 << 12];

// Whether dispatches report their counts only by tell_late, set by the test.
int late;
// Arguments of a dispatch that has not reported.
const unsigned char *untold;

static Code allocate(Address *address, size_t length) {
    Handle made = mmap(0, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED || allocated == MOST_ALLOCATIONS) return 2;
    *address = (Address)made;
    allocations[allocated].begin = *address;
    allocations[allocated++].length = length;
    return 0;
}

static int found(Address address) {
    for (int i = 0; i < allocated; i++)
        if (address - allocations[i].begin < allocations[i].length) return i;
    return -1;
}

Code cuDriverGetVersion(int *version) { return *version = 13000, 0; }
Code cuInit(unsigned flags) { return 0; }
Code cuGetErrorName(Code code, const char **name) { return *name = "CUDA_ERROR", 0; }
Code cuGetErrorString(Code code, const char **text) { return *text = "refused by the driver without a GPU", 0; }

Code cuDeviceGetCount(int *count) { return *count = 1, 0; }
Code cuDeviceGet(int *device, int ordinal) { return *device = ordinal, 0; }
Code cuDeviceGetName(char *name, int length, int device) { return strncpy(name, "no GPU", length), 0; }
Code cuDeviceGetUuid_v2(void *uuid, int device) { return memset(uuid, 7, 16), 0; }
Code cuDeviceTotalMem_v2(size_t *bytes, int device) { return *bytes = 1ull << 37, 0; }
Code cuDeviceGetPCIBusId(char *id, int length, int device) { return strncpy(id, "0000:00:06.0", length), 0; }
Code cuDeviceCanAccessPeer(int *can, int one, int other) { return *can = 1, 0; }
Code cuDeviceGetAttribute(int *value, int attribute, int device) {
    switch (attribute) {
    case 8: return *value = 48 << 10, 0;    // shared memory of a block
    case 10: return *value = 32, 0;         // threads of a warp
    case 16: return *value = 132, 0;        // multiprocessors
    case 75: return *value = 9, 0;          // compute capability
    case 76: return *value = 0, 0;
    case 97: return *value = 227 << 10, 0;  // shared memory of a block that asks for more
    default: return *value = 1, 0;
    }
}

Code cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { return *flags = 0, *active = 1, 0; }
Code cuDevicePrimaryCtxRetain(Handle *context, int device) { return *context = CONTEXT, 0; }
Code cuDevicePrimaryCtxRelease_v2(int device) { return 0; }
Code cuCtxPushCurrent_v2(Handle context) { return calls_push++, 0; }
Code cuCtxPopCurrent_v2(Handle *context) { return calls_pop++, *context = CONTEXT, 0; }
Code cuCtxGetCurrent(Handle *context) { return calls_current++, *context = CONTEXT, 0; }
Code cuCtxEnablePeerAccess(Handle context, unsigned flags) { return 0; }
Code cuThreadExchangeStreamCaptureMode(int *mode) {
    static __thread int now;
    int before = now;
    now = *mode;
    return calls_mode++, *mode = before, 0;
}

Code cuMemGetInfo_v2(size_t *unused, size_t *total) { return *unused = *total = 1ull << 37, 0; }
Code cuMemAlloc_v2(Address *address, size_t length) { return allocate(address, length); }
Code cuMemFree_v2(Address address) { return 0; }
Code cuMemHostAlloc(Handle *memory, size_t length, unsigned flags) { return allocate((Address *)memory, length); }
Code cuMemFreeHost(Handle memory) { return 0; }
Code cuMemHostGetDevicePointer_v2(Address *device, Handle memory, unsigned flags) { return *device = (Address)memory, 0; }
Code cuMemHostRegister_v2(Handle memory, size_t length, unsigned flags) { return 0; }
Code cuMemHostUnregister(Handle memory) { return 0; }
Code cuMemCreate(Address *handle, size_t length, const void *properties, Address flags) {
    static Address made;
    return *handle = ++made, 0;
}
Code cuMemRelease(Address handle) { return 0; }
Code cuMemExportToShareableHandle(void *out, Address handle, int type, Address flags) {
    return (*(int *)out = memfd_create("memory", 0)) < 0;
}
Code cuMemImportFromShareableHandle(Address *handle, Handle from, int type) { return INVALID; }
Code cuMemGetAllocationGranularity(size_t *bytes, const void *properties, int option) { return *bytes = 2 << 20, 0; }
Code cuMemAddressReserve(Address *address, size_t length, size_t alignment, Address wish, Address flags) {
    return allocate(address, length);
}
Code cuMemAddressFree(Address address, size_t length) { return 0; }
Code cuMemMap(Address address, size_t length, size_t offset, Address handle, Address flags) { return 0; }
Code cuMemUnmap(Address address, size_t length) { return 0; }
Code cuMemSetAccess(Address address, size_t length, const void *access, size_t count) { return 0; }
Code cuMemRetainAllocationHandle(Address *handle, void *address) { return *handle = 1, 0; }
Code cuMemGetAddressRange_v2(Address *begin, size_t *length, Address address) {
    int at = found(address);
    if (at < 0) return INVALID;
    return *begin = allocations[at].begin, *length = allocations[at].length, 0;
}
Code cuPointerGetAttributes(unsigned count, const int *attributes, void **values, Address address) {
    int at = found(address);
    for (unsigned i = 0; i < count; i++) {
        switch (attributes[i]) {
        case 2: *(unsigned *)values[i] = at < 0 ? 0 : 2; break;  // kind of memory: a device's
        case 7: *(Address *)values[i] = at + 1; break;           // its number
        case 8: case 10: case 13: *(unsigned *)values[i] = attributes[i] == 13 && at >= 0; break;
        case 9: *(int *)values[i] = at < 0 ? -1 : 0; break;      // the device
        case 11: *(Address *)values[i] = at < 0 ? 0 : allocations[at].begin; break;
        case 12: *(size_t *)values[i] = at < 0 ? 0 : allocations[at].length; break;
        default: *(Address *)values[i] = 0;
        }
    }
    return 0;
}
Code cuMemcpyAsync(Address to, Address from, size_t length, Handle stream) {
    return memcpy((Handle)to, (Handle)from, length), 0;
}
Code cuMemcpyDtoDAsync_v2(Address to, Address from, size_t length, Handle stream) {
    return memcpy((Handle)to, (Handle)from, length), 0;
}
Code cuMemcpyHtoDAsync_v2(Address to, const void *from, size_t length, Handle stream) {
    return memcpy((Handle)to, from, length), 0;
}
Code cuMemcpyDtoHAsync_v2(Handle to, Address from, size_t length, Handle stream) {
    return memcpy(to, (Handle)from, length), 0;
}
Code cuMemsetD8Async(Address to, unsigned char value, size_t length, Handle stream) {
    return memset((Handle)to, value, length), 0;
}

Code cuStreamCreateWithPriority(Handle *stream, unsigned flags, int priority) { return (*stream = malloc(1)) == 0; }
Code cuStreamDestroy_v2(Handle stream) { return free(stream), 0; }
Code cuStreamQuery(Handle stream) { return 0; }
Code cuStreamWaitEvent(Handle stream, Handle event, unsigned flags) { return calls_wait++, 0; }
Code cuStreamGetCtx(Handle stream, Handle *context) { return calls_owner++, *context = CONTEXT, 0; }
Code cuStreamIsCapturing(Handle stream, int *status) { return calls_capturing++, *status = in_capture, 0; }
Code cuEventCreate(Handle *event, unsigned flags) { return (*event = malloc(1)) == 0; }
Code cuEventDestroy_v2(Handle event) { return free(event), 0; }
Code cuEventRecord(Handle event, Handle stream) { return calls_record++, 0; }
Code cuEventQuery(Handle event) { return calls_query++, 0; }
Code cuEventElapsedTime(float *ms, Handle from, Handle to) { return *ms = 0, 0; }

Code cuModuleLoadData(Handle *module, const void *image) { return *module = CONTEXT, 0; }
Code cuModuleUnload(Handle module) { return 0; }
Code cuModuleGetFunction(Handle *function, Handle module, const char *name) {
    return *function = strstr(name, "dispatch") ? DISPATCH : strstr(name, "combine") ? COMBINE : CONTEXT, 0;
}
Code cuFuncLoad(Handle function) { return 0; }
Code cuFuncGetAttribute(int *value, int attribute, Handle function) { return *value = 100, 0; }
Code cuFuncSetAttribute(Handle function, int attribute, int value) { return 0; }
// A dispatch of one rank with one expert for each token, as far as the host waits for it.
static void tell_counts(const unsigned char *arguments) {
    uint64_t word = *(const uint64_t *)(arguments + at_count_word), said = *(const uint64_t *)(arguments + at_host_words);
    if (said) *(uint32_t *)said = *(const uint32_t *)(arguments + at_host_word);
    if (word) *(volatile uint64_t *)word = 1ull << 32 | *(const uint32_t *)(arguments + at_tokens);
}
void tell_late(void) {
    if (untold) tell_counts(untold);
    untold = 0;
}
Code cuLaunchKernel(Handle function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned ty, unsigned tz,
                    unsigned shared, Handle stream, void **parameters, void **extra) {
    if (function == DISPATCH) {
        untold = memcpy(last_dispatch, parameters[0], bytes_of_dispatch);
        if (!late) tell_late();
    }
    if (function == COMBINE) memcpy(last_combine, parameters[0], bytes_of_combine);
    return calls_launch++, 0;
}
// As CUDA 12.0's headers lay them out; 1 of attribute 6 lets the launch begin before the kernel before it has ended.
struct LaunchAttribute {
    unsigned id;
    char pad[4];
    union {
        char bytes[64];
        int allowed;
    } value;
};
struct LaunchConfig {
    unsigned grid[3], block[3], shared;
    Handle stream;
    struct LaunchAttribute *attributes;
    unsigned count;
};
Code cuLaunchKernelEx(const struct LaunchConfig *config, Handle function, void **parameters, void **extra) {
    if (config->count != 1 || config->attributes->id != 6 || config->attributes->value.allowed != 1) return INVALID;
    calls_early++;
    const unsigned *grid = config->grid, *block = config->block;
    return cuLaunchKernel(function, grid[0], grid[1], grid[2], block[0], block[1], block[2], config->shared, config->stream,
                          parameters, extra);
}
