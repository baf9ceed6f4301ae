/* What a recording of a CUDA graph changes for the rest of the runtime. */
#pragma once
#include <cuda_runtime_api.h>
#include <stdbool.h>

/* The stream is being recorded: nobody may wait for it. */
bool graph_records(cudaStream_t stream);
/* Count a kernel for the graph that is being recorded, if there is one. */
bool graph_takes_kernel(void);
