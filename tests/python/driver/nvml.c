// NVIDIA's management library without a GPU, for test_cli_top.py: two devices, of which the second has no rates.
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { DONE = 0, INVALID = 2, NOT_SUPPORTED = 3 };
static int devices[2];

int nvmlInit_v2(void) {
    while (getenv("NVML_HANGS"))
        pause();
    return DONE;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = 2;
    return DONE;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    if (index > 1)
        return INVALID;
    *device = &devices[index];
    return DONE;
}

int nvmlDeviceGetName(void *device, char *name, unsigned length) {
    strncpy(name, device == devices ? "Pretended GPU" : "Another GPU", length);
    return DONE;
}

int nvmlDeviceGetUtilizationRates(void *device, unsigned rates[2]) {
    if (device != devices)
        return NOT_SUPPORTED;
    rates[0] = 37;
    rates[1] = 5;
    return DONE;
}

int nvmlDeviceGetMemoryInfo(void *device, unsigned long long sizes[3]) {
    sizes[0] = 80ull << 30;
    sizes[2] = (device == devices ? 20ull : 0ull) << 30;
    sizes[1] = sizes[0] - sizes[2];
    return DONE;
}
