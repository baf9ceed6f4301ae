/* libcublas and libcublasLt: products that nobody computes. Most functions take what they are given
 * and say "done", so they need no arguments: the caller leaves those where nobody looks. The build
 * adds all functions that compute, see refuse.h. */
#include "kept.h"
#include "timeline.h"
#include <stdlib.h>
#include <string.h>

#define SUCCEEDS(name) \
    int name(void) { return 0; }
#define CREATES(name) \
    int name(void **out) { \
        *out = calloc(1, 256); \
        return 0; \
    }
#define DESTROYS(name) \
    int name(void *handle) { \
        free(handle); \
        return 0; \
    }

CREATES(cublasCreate_v2)
DESTROYS(cublasDestroy_v2)
SUCCEEDS(cublasSetStream_v2)
SUCCEEDS(cublasSetWorkspace_v2)
SUCCEEDS(cublasSetMathMode)
SUCCEEDS(cublasSetPointerMode_v2)
SUCCEEDS(cublasSetSmCountTarget)

int cublasGetMathMode(void *handle, int *out) {
    (void)handle;
    *out = 0;
    return 0;
}

int cublasGetPointerMode_v2(void *handle, int *out) { return cublasGetMathMode(handle, out); }

size_t cublasLtGetVersion(void) { return 130100; }

CREATES(cublasLtMatmulDescCreate)
DESTROYS(cublasLtMatmulDescDestroy)
SUCCEEDS(cublasLtMatmulDescSetAttribute)
CREATES(cublasLtMatmulPreferenceCreate)
DESTROYS(cublasLtMatmulPreferenceDestroy)
SUCCEEDS(cublasLtMatmulPreferenceSetAttribute)
CREATES(cublasLtMatrixLayoutCreate)
DESTROYS(cublasLtMatrixLayoutDestroy)
SUCCEEDS(cublasLtMatrixLayoutSetAttribute)
CREATES(cublasLtCreate)
DESTROYS(cublasLtDestroy)

int cublasLtMatmul(void) {
    timeline_add(KERNEL, NULL, 0, 0);
    forget_all();
    return 0;
}

/* One algorithm, which takes no workspace (96 bytes of a cublasLtMatmulHeuristicResult_t). */
int cublasLtMatmulAlgoGetHeuristic(
    void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference, int wanted,
    void *results, int *found) {
    (void)handle, (void)operation, (void)a, (void)b, (void)c, (void)d, (void)preference;
    (void)wanted;
    memset(results, 0, 96);
    *found = 1;
    return 0;
}
