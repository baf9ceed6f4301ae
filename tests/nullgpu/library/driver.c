/* libcuda: what torch's allocator, Triton and DeepSpeed ask of the driver.
 *
 * Physical memory (cuMemCreate) is a number of bytes taken off the device's; mapping it changes
 * nothing, since there is nothing to read.
 */
#include "device.h"
#include <cuda.h>
#include <stdio.h>
#include <string.h>

#define SUCCEEDS(name, ...) \
    CUresult name(__VA_ARGS__) { return CUDA_SUCCESS; }
#define ANSWERS(name, value, type, ...) \
    CUresult name(type *out __VA_OPT__(, ) __VA_ARGS__) { \
        *out = value; \
        return CUDA_SUCCESS; \
    }

/* Contexts, modules and kernels are this one thing. */
static char something[256];

SUCCEEDS(cuInit, unsigned)
ANSWERS(cuDriverGetVersion, VERSION_OF_CUDA, int)
ANSWERS(cuDeviceGet, 0, CUdevice, int)
ANSWERS(cuDeviceGetCount, 1, int)
ANSWERS(cuDeviceGetAttribute, device_attribute(number), int, CUdevice_attribute number, CUdevice)
ANSWERS(cuDeviceTotalMem, device_total(), size_t, CUdevice)

CUresult cuDeviceGetName(char *out, int bytes, CUdevice device) {
    snprintf(out, bytes, "%s", device == 0 ? GPU_NAME : "");
    return CUDA_SUCCESS;
}

CUresult cuDeviceGetUuid(CUuuid *out, CUdevice device) {
    memset(out, 0, sizeof *out);
    return device == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    *flags = 0;
    *active = 1;
    return device == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

ANSWERS(cuDevicePrimaryCtxRetain, (CUcontext)something, CUcontext, CUdevice)
ANSWERS(cuCtxGetCurrent, (CUcontext)something, CUcontext)
ANSWERS(cuCtxGetDevice, 0, CUdevice)
ANSWERS(cuCtxPopCurrent, (CUcontext)something, CUcontext)
ANSWERS(cuCtxGetLimit, 0, size_t, CUlimit)
SUCCEEDS(cuDevicePrimaryCtxRelease, CUdevice)
SUCCEEDS(cuCtxSetCurrent, CUcontext)
SUCCEEDS(cuCtxPushCurrent, CUcontext)
SUCCEEDS(cuCtxSetLimit, CUlimit, size_t)

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
    *out = error == CUDA_ERROR_OUT_OF_MEMORY ? "out of memory" : "an error of the stand-in";
    return CUDA_SUCCESS;
}

/* Expandable segments. */
ANSWERS(
    cuMemGetAllocationGranularity, 2 << 20, size_t, const CUmemAllocationProp *,
    CUmemAllocationGranularity_flags)
ANSWERS(
    cuMemAddressReserve, (CUdeviceptr)device_addresses(bytes), CUdeviceptr, size_t bytes, size_t,
    CUdeviceptr, unsigned long long)
SUCCEEDS(cuMemAddressFree, CUdeviceptr, size_t)
SUCCEEDS(
    cuMemMap, CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long)
SUCCEEDS(cuMemUnmap, CUdeviceptr, size_t)
SUCCEEDS(cuMemSetAccess, CUdeviceptr, size_t, const CUmemAccessDesc *, size_t)

CUresult cuMemCreate(
    CUmemGenericAllocationHandle *out, size_t bytes, const CUmemAllocationProp *properties,
    unsigned long long flags) {
    (void)properties, (void)flags;
    if (!device_take(bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    *out = bytes; /* all that there is to know about it */
    return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle bytes) {
    device_give_back(bytes);
    return CUDA_SUCCESS;
}
