/* libcuda: what torch's allocator, Triton and DeepSpeed ask of the driver.
 *
 * Physical memory (cuMemCreate) is a number of bytes taken off the device's; mapping it changes
 * nothing, since there is nothing to read.
 */
#include "device.h"
#include <cuda.h>
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

void *driver_function(const char *name);

#define SUCCEEDS(name, ...) \
    CUresult name(__VA_ARGS__) { return CUDA_SUCCESS; }
#define ANSWERS(name, value, type, ...) \
    CUresult name(type *out __VA_OPT__(, ) __VA_ARGS__) { \
        *out = value; \
        return CUDA_SUCCESS; \
    }

/* Modules and kernels are this one thing; a context is its device's place in this. */
static char something[256], contexts[MOST_DEVICES];

static CUcontext context_of(int ordinal) { return (CUcontext)&contexts[ordinal]; }

static int ordinal_of(CUcontext context) {
    size_t ordinal = (size_t)((char *)context - contexts);
    return context && ordinal < MOST_DEVICES ? (int)ordinal : -1;
}

CUresult cuInit(unsigned flags) {
    (void)flags;
    return device_count() ? CUDA_SUCCESS : CUDA_ERROR_NO_DEVICE;
}

ANSWERS(cuDriverGetVersion, CUDA_VERSION, int)
ANSWERS(cuDeviceGetCount, device_count(), int)

/* Answers about a device, if there is one. */
#define ANSWERS_OF_DEVICE(name, value, type, ...) \
    CUresult name(type *out, ##__VA_ARGS__, CUdevice number) { \
        if (!device(number)) \
            return CUDA_ERROR_INVALID_DEVICE; \
        *out = value; \
        return CUDA_SUCCESS; \
    }

ANSWERS_OF_DEVICE(cuDeviceGet, number, CUdevice)
ANSWERS_OF_DEVICE(
    cuDeviceGetAttribute, device_attribute(number, attribute), int, CUdevice_attribute attribute)
ANSWERS_OF_DEVICE(cuDeviceTotalMem, device(number)->total_bytes, size_t)
ANSWERS_OF_DEVICE(cuDevicePrimaryCtxRetain, context_of(number), CUcontext)

CUresult cuDeviceGetName(char *out, int bytes, CUdevice number) {
    if (!device(number))
        return CUDA_ERROR_INVALID_DEVICE;
    snprintf(out, bytes, "%s", device(number)->name);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid *out, CUdevice number) {
    if (!device(number))
        return CUDA_ERROR_INVALID_DEVICE;
    device_uuid(device(number), (unsigned char *)out->bytes);
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetPCIBusId(char *out, int bytes, CUdevice number) {
    if (!device(number))
        return CUDA_ERROR_INVALID_DEVICE;
    snprintf(out, bytes, "0000:%02X:00.0", device(number)->number + 1);
    return CUDA_SUCCESS;
}

CUresult cuDeviceCanAccessPeer(int *out, CUdevice from, CUdevice to) {
    if (!device(from) || !device(to))
        return CUDA_ERROR_INVALID_DEVICE;
    *out = from != to && device(from)->peer_access && device(to)->peer_access;
    return CUDA_SUCCESS;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice number, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return device(number) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

ANSWERS(cuCtxGetCurrent, context_of(device_current()), CUcontext)
ANSWERS(cuCtxGetDevice, device_current(), CUdevice)
ANSWERS(cuCtxGetLimit, 0, size_t, CUlimit)
SUCCEEDS(cuCtxSynchronize, void)
SUCCEEDS(cuDevicePrimaryCtxRelease, CUdevice)
SUCCEEDS(cuCtxSetLimit, CUlimit, size_t)

CUresult cuCtxSetCurrent(CUcontext context) {
    return !context || device_select(ordinal_of(context)) ? CUDA_SUCCESS
                                                          : CUDA_ERROR_INVALID_CONTEXT;
}

static __thread int pushed[64], depth;

CUresult cuCtxPushCurrent(CUcontext context) {
    if (depth == 64)
        return CUDA_ERROR_INVALID_CONTEXT;
    pushed[depth++] = device_current();
    return cuCtxSetCurrent(context);
}

CUresult cuCtxPopCurrent(CUcontext *out) {
    if (!depth)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (out)
        *out = context_of(device_current());
    return device_select(pushed[--depth]) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_CONTEXT;
}

ANSWERS(cuModuleLoad, (CUmodule)something, CUmodule, const char *)
ANSWERS(cuModuleLoadData, (CUmodule)something, CUmodule, const void *)
ANSWERS(
    cuModuleLoadDataEx, (CUmodule)something, CUmodule, const void *, unsigned, CUjit_option *,
    void **)
ANSWERS(cuModuleGetFunction, (CUfunction)something, CUfunction, CUmodule, const char *)
SUCCEEDS(cuModuleUnload, CUmodule)
SUCCEEDS(cuFuncSetAttribute, CUfunction, CUfunction_attribute, int)
SUCCEEDS(cuFuncSetCacheConfig, CUfunction, CUfunc_cache)
ANSWERS(cuOccupancyMaxActiveClusters, 16, int, CUfunction, const CUlaunchConfig *)
ANSWERS(cuOccupancyMaxActiveBlocksPerMultiprocessor, 2, int, CUfunction, int, size_t)

CUresult cuFuncGetAttribute(int *out, CUfunction_attribute number, CUfunction function) {
    (void)function;
    *out = number == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024
           : number == CU_FUNC_ATTRIBUTE_NUM_REGS            ? 64
                                                             : 0;
    return CUDA_SUCCESS;
}

#define LAUNCHES(name, ...) \
    CUresult name(__VA_ARGS__) { \
        device_launch(); \
        return CUDA_SUCCESS; \
    }

LAUNCHES(
    cuLaunchKernel, CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
    unsigned, CUstream, void **, void **)
LAUNCHES(cuLaunchKernelEx, const CUlaunchConfig *, CUfunction, void **, void **)
LAUNCHES(
    cuLaunchCooperativeKernel, CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned,
    unsigned, unsigned, CUstream, void **)

/* Triton asks where a pointer lies as the device sees it. */
CUresult cuPointerGetAttribute(void *out, CUpointer_attribute number, CUdeviceptr address) {
    if (number != CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
        return CUDA_ERROR_NOT_SUPPORTED;
    *(CUdeviceptr *)out = address;
    return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char **out) {
    *out = error == CUDA_ERROR_OUT_OF_MEMORY   ? "out of memory"
           : error == CUDA_ERROR_NOT_SUPPORTED ? "operation not supported" /* as refuse.h has it */
                                               : "an error of the null GPU";
    return CUDA_SUCCESS;
}

/* torch 2.14 asks for the driver's log, which stays empty. */
#if CUDA_VERSION >= 12090
CUresult cuLogsRegisterCallback(CUlogsCallback heard, void *data, CUlogsCallbackHandle *out) {
    (void)heard, (void)data;
    *out = NULL;
    return CUDA_SUCCESS;
}
SUCCEEDS(cuLogsUnregisterCallback, CUlogsCallbackHandle)
#endif

/* Expandable segments. */
ANSWERS(
    cuMemGetAllocationGranularity, 2 << 20, size_t, const CUmemAllocationProp *,
    CUmemAllocationGranularity_flags)
SUCCEEDS(
    cuMemMap, CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long)
SUCCEEDS(cuMemUnmap, CUdeviceptr, size_t)
SUCCEEDS(cuMemSetAccess, CUdeviceptr, size_t, const CUmemAccessDesc *, size_t)

CUresult cuMemAddressReserve(
    CUdeviceptr *out, size_t bytes, size_t alignment, CUdeviceptr wanted, unsigned long long flags) {
    (void)alignment, (void)wanted, (void)flags;
    *out = (CUdeviceptr)device_addresses(device_current(), bytes);
    return *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t bytes) {
    device_addresses_free((void *)address, bytes);
    return CUDA_SUCCESS;
}

/* A handle is its bytes and, in the last 8 bits, its device. */
CUresult cuMemCreate(
    CUmemGenericAllocationHandle *out, size_t bytes, const CUmemAllocationProp *properties,
    unsigned long long flags) {
    (void)flags;
    int ordinal = properties->location.id;
    if (!device(ordinal))
        return CUDA_ERROR_INVALID_DEVICE;
    if (!device_take(ordinal, bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    *out = bytes << 8 | (unsigned)ordinal;
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    device_give_back((int)(handle & 255), handle >> 8);
    return CUDA_SUCCESS;
}

CUresult cuMemGetInfo(size_t *free_bytes, size_t *total) {
    if (!device_count())
        return CUDA_ERROR_NO_DEVICE;
    *free_bytes = device_free_bytes(device_current());
    *total = device(device_current())->total_bytes;
    return CUDA_SUCCESS;
}

/* Where a tensor lies is never read. */
SUCCEEDS(
    cuTensorMapEncodeTiled, CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
    const cuuint64_t *, const cuuint64_t *, const cuuint32_t *, const cuuint32_t *,
    CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill)

/* Whoever loads the driver by its name asks for its functions so. */
CUresult cuGetProcAddress(
    const char *name, void **out, int version, cuuint64_t flags,
    CUdriverProcAddressQueryResult *found) {
    (void)version, (void)flags;
    *out = driver_function(name);
    if (found)
        *found = *out ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    return *out ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* The newest version: by a name with _v2 or _v3, else by its own. */
void *driver_function(const char *name) {
    char newer[128];
    for (int version = 4; version >= 2; version--) {
        snprintf(newer, sizeof newer, "%s_v%d", name, version);
        void *found = dlsym(RTLD_DEFAULT, newer);
        if (found)
            return found;
    }
    return dlsym(RTLD_DEFAULT, name);
}
