/* libcudnn: a graph (attention, a convolution) has one plan, without a workspace, and to run it is
 * to do nothing, as with all functions that compute: the build adds those, see refuse.h. What only
 * describes, without a handle, is cuDNN's own. */
#include "kept.h"
#include "timeline.h"
#include <cudnn.h>
#include <stdlib.h>

#define SUCCEEDS(name, ...) \
    cudnnStatus_t name(__VA_ARGS__) { return CUDNN_STATUS_SUCCESS; }

cudnnStatus_t cudnnCreate(cudnnHandle_t *out) {
    *out = malloc(1);
    return CUDNN_STATUS_SUCCESS;
}

SUCCEEDS(cudnnDestroy, cudnnHandle_t)
SUCCEEDS(cudnnSetStream, cudnnHandle_t, cudaStream_t)

/* Sizes of workspaces and of what a backward pass needs besides: none. */
#define HAS_NO_SIZE(name, ...) \
    cudnnStatus_t name(__VA_ARGS__, size_t *out) { \
        *out = 0; \
        return CUDNN_STATUS_SUCCESS; \
    }
#define T cudnnTensorDescriptor_t

HAS_NO_SIZE(
    cudnnGetBatchNormalizationForwardTrainingExWorkspaceSize, cudnnHandle_t,
    cudnnBatchNormMode_t, cudnnBatchNormOps_t, const T, const T, const T, const T,
    const cudnnActivationDescriptor_t)
HAS_NO_SIZE(
    cudnnGetBatchNormalizationBackwardExWorkspaceSize, cudnnHandle_t, cudnnBatchNormMode_t,
    cudnnBatchNormOps_t, const T, const T, const T, const T, const T, const T,
    const cudnnActivationDescriptor_t)
HAS_NO_SIZE(
    cudnnGetBatchNormalizationTrainingExReserveSpaceSize, cudnnHandle_t, cudnnBatchNormMode_t,
    cudnnBatchNormOps_t, const cudnnActivationDescriptor_t, const T)

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

cudnnStatus_t cudnnBackendExecute(
    cudnnHandle_t handle, cudnnBackendDescriptor_t plan, cudnnBackendDescriptor_t variables) {
    (void)handle, (void)plan, (void)variables;
    timeline_add(KERNEL, NULL, 0, 0);
    forget_all();
    return CUDNN_STATUS_SUCCESS;
}

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
