// A compiler for the driver without a GPU: it makes code that nobody runs.
#include <string.h>

typedef unsigned Code;
enum { LENGTH = 64 };

Code nvrtcVersion(int *major, int *minor) { return *major = 13, *minor = 0, 0; }
Code nvrtcCreateProgram(void **program, const char *source, const char *name, int headers, const char *const *texts,
                        const char *const *names) {
    return *program = (void *)1, 0;
}
Code nvrtcDestroyProgram(void **program) { return 0; }
Code nvrtcCompileProgram(void *program, int options, const char *const *texts) { return 0; }
Code nvrtcGetCUBINSize(void *program, size_t *length) { return *length = LENGTH, 0; }
Code nvrtcGetCUBIN(void *program, char *code) { return memset(code, 1, LENGTH), 0; }
Code nvrtcGetPTXSize(void *program, size_t *length) { return *length = LENGTH, 0; }
Code nvrtcGetPTX(void *program, char *code) { return memset(code, 1, LENGTH), 0; }
Code nvrtcGetProgramLogSize(void *program, size_t *length) { return *length = 1, 0; }
Code nvrtcGetProgramLog(void *program, char *log) { return *log = 0, 0; }
const char *nvrtcGetErrorString(Code code) { return "refused"; }
Code nvrtcGetNumSupportedArchs(int *count) { return *count = 1, 0; }
Code nvrtcGetSupportedArchs(int *archs) { return *archs = 90, 0; }
