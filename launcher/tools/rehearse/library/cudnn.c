/* libcudnn, as far as torch's fused attention goes: a graph has one plan, without a workspace, and
 * to run it is to do nothing. Everything else is cuDNN's own. */
#include <cudnn_backend.h>
#include <stdlib.h>

#define SUCCEEDS(name, ...) \
    cudnnStatus_t name(__VA_ARGS__) { return CUDNN_STATUS_SUCCESS; }

cudnnStatus_t cudnnCreate(cudnnHandle_t *out) {
    *out = malloc(1);
    return CUDNN_STATUS_SUCCESS;
}

SUCCEEDS(cudnnDestroy, cudnnHandle_t)
SUCCEEDS(cudnnSetStream, cudnnHandle_t, cudaStream_t)

cudnnStatus_t cudnnBackendCreateDescriptor(
    cudnnBackendDescriptorType_t type, cudnnBackendDescriptor_t *out) {
    (void)type;
    *out = calloc(1, 8);
    return CUDNN_STATUS_SUCCESS;
}

cudnnStatus_t cudnnBackendDestroyDescriptor(cudnnBackendDescriptor_t descriptor) {
    free(descriptor);
    return CUDNN_STATUS_SUCCESS;
}

SUCCEEDS(
    cudnnBackendSetAttribute, cudnnBackendDescriptor_t, cudnnBackendAttributeName_t,
    cudnnBackendAttributeType_t, int64_t, const void *)
SUCCEEDS(cudnnBackendFinalize, cudnnBackendDescriptor_t)
SUCCEEDS(cudnnBackendExecute, cudnnHandle_t, cudnnBackendDescriptor_t, cudnnBackendDescriptor_t)

/* One of whatever is asked for: a descriptor is left as it is, a number is 0. */
cudnnStatus_t cudnnBackendGetAttribute(
    const cudnnBackendDescriptor_t descriptor, cudnnBackendAttributeName_t name,
    cudnnBackendAttributeType_t type, int64_t wanted, int64_t *found, void *out) {
    (void)descriptor, (void)name;
    if (found)
        *found = 1;
    if (out && wanted > 0 && type == CUDNN_TYPE_INT64)
        *(int64_t *)out = 0;
    if (out && wanted > 0 && type == CUDNN_TYPE_INT32)
        *(int32_t *)out = 0;
    return CUDNN_STATUS_SUCCESS;
}
