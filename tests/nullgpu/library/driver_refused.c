/* What torch and Triton look up in libcuda when they start, and no run comes to use: each says that
 * it is not supported. Without CUDA's header, since that would want their arguments. */
enum { NOT_SUPPORTED = 801 };
#define REFUSES(name) \
    int name(void) { return NOT_SUPPORTED; }

REFUSES(cuCtxFromGreenCtx)
REFUSES(cuDevResourceGenerateDesc)
REFUSES(cuDevSmResourceSplitByCount)
REFUSES(cuDeviceGetDevResource)
REFUSES(cuGetExportTable)
REFUSES(cuGetProcAddress_v2)
REFUSES(cuGreenCtxCreate)
REFUSES(cuGreenCtxDestroy)
REFUSES(cuGreenCtxStreamCreate)
REFUSES(cuLinkAddData_v2)
REFUSES(cuLinkComplete)
REFUSES(cuLinkCreate_v2)
REFUSES(cuMemExportToShareableHandle)
REFUSES(cuMemGetAddressRange_v2)
REFUSES(cuMemGetAllocationPropertiesFromHandle)
REFUSES(cuMemImportFromShareableHandle)
REFUSES(cuMemRetainAllocationHandle)
REFUSES(cuMemsetD32Async)
REFUSES(cuMulticastAddDevice)
REFUSES(cuMulticastBindMem)
REFUSES(cuMulticastCreate)
REFUSES(cuMulticastUnbind)
REFUSES(cuStreamWriteValue32_v2)
REFUSES(cuTensorMapEncodeIm2col)
REFUSES(cuTensorMapEncodeTiled)
