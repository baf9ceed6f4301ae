/* What torch and `doctor` ask of libnvidia-ml, beside what nvml_stub.c has. */
#include <stdio.h>

typedef struct Device Device;
int nvmlInitWithFlags(unsigned flags);
int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **out);

enum { SUCCESS = 0, NOT_SUPPORTED = 3 };

int nvmlInit(void) { return nvmlInitWithFlags(0); }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, Device **out) {
    (void)bus;
    return nvmlDeviceGetHandleByIndex_v2(0, out);
}

int nvmlDeviceGetNvLinkRemoteDeviceType(void) { return NOT_SUPPORTED; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(void) { return NOT_SUPPORTED; }

int nvmlDeviceGetComputeRunningProcesses(Device *device, unsigned *count, void *processes) {
    (void)device, (void)processes;
    *count = 0;
    return SUCCESS;
}

int nvmlSystemGetDriverVersion(char *out, unsigned bytes) {
    snprintf(out, bytes, "580.00");
    return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion_v2(int *out) {
    *out = 13000;
    return SUCCESS;
}
