/* Preloaded, it moves a process's wall clock by what the file STEPPING_CLOCK says, in nanoseconds as one 64-bit
 * integer. The monotonic clock stays as it is. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *offset;

__attribute__((constructor)) static void map_offset(void) {
    const char *path = getenv("STEPPING_CLOCK");
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *mapped = file < 0 ? MAP_FAILED : mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
    if (file >= 0)
        close(file);
    if (mapped != MAP_FAILED)
        offset = mapped;
}

static int64_t wall_ns(void) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real)
        real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    struct timespec now;
    real(CLOCK_REALTIME, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec + (offset ? *offset : 0);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real)
        real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    if (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE)
        return real(clock, now);
    int64_t ns = wall_ns();
    now->tv_sec = ns / 1000000000;
    now->tv_nsec = ns % 1000000000;
    return 0;
}

int gettimeofday(struct timeval *now, void *zone) {
    int64_t ns = wall_ns();
    (void)zone;
    now->tv_sec = ns / 1000000000;
    now->tv_usec = ns % 1000000000 / 1000;
    return 0;
}

time_t time(time_t *where) {
    time_t now = wall_ns() / 1000000000;
    if (where)
        *where = now;
    return now;
}
