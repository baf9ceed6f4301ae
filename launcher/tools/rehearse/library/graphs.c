/* CUDA graphs: while a stream is recorded its kernels are counted for the graph, and a replay is one
 * launch of them all. One recording at a time, as in one process of a training run. */
#include "graphs.h"
#include "device.h"
#include "timeline.h"
#include <stdatomic.h>
#include <stdlib.h>

typedef struct {
    size_t kernels;
} Graph;

static cudaStream_t recorded;
static unsigned long long recordings;
static _Atomic(Graph *) recording;

bool graph_records(cudaStream_t stream) { return recording && stream == recorded; }

bool graph_takes_kernel(void) {
    Graph *graph = recording;
    if (graph)
        graph->kernels++;
    return graph;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    (void)mode;
    if (recording)
        return cudaErrorIllegalState;
    recorded = stream;
    recordings++;
    recording = calloc(1, sizeof(Graph));
    return cudaSuccess;
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *out) {
    if (!graph_records(stream))
        return cudaErrorIllegalState;
    *out = (cudaGraph_t)recording;
    recording = NULL;
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *out) {
    *out = graph_records(stream) ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

#if CUDART_VERSION < 13000
#define EDGES
#else
#define EDGES const cudaGraphEdgeData **,
#endif

cudaError_t cudaStreamGetCaptureInfo(
    cudaStream_t stream, enum cudaStreamCaptureStatus *out, unsigned long long *id,
    cudaGraph_t *graph, const cudaGraphNode_t **, EDGES size_t *) {
    if (id)
        *id = graph_records(stream) ? recordings : 0;
    if (graph)
        *graph = (cudaGraph_t)recording;
    return cudaStreamIsCapturing(stream, out);
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    (void)nodes;
    *count = ((Graph *)graph)->kernels;
    return cudaSuccess;
}

static cudaError_t instantiate(cudaGraphExec_t *out, cudaGraph_t graph) {
    Graph *copy = malloc(sizeof *copy);
    *copy = *(Graph *)graph;
    *out = (cudaGraphExec_t)copy;
    return cudaSuccess;
}

#if CUDART_VERSION >= 12000
cudaError_t cudaGraphInstantiate(
    cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags) {
    (void)flags;
    return instantiate(out, graph);
}
#endif

cudaError_t cudaGraphInstantiateWithFlags(
    cudaGraphExec_t *out, cudaGraph_t graph, unsigned long long flags) {
    (void)flags;
    return instantiate(out, graph);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
    (void)stream;
    device_launch();
    for (size_t kernel = 1; kernel < ((Graph *)graph)->kernels; kernel++)
        timeline_add(KERNEL, NULL, 0, 0);
    return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    free(graph);
    return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
    free(graph);
    return cudaSuccess;
}
