/* libnvidia-ml: the GPUs of the machine, and the memory that this process has taken of them. What
 * only a real one can answer (power, utilisation, temperature) is not supported. */
#include "device.h"
#include <stdint.h>
#include <stdio.h>
#include <string.h>

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    ARGUMENT_VERSION_MISMATCH = 25,
};

typedef const Device *Handle;
static int references;

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    references++;
    return SUCCESS;
}

int nvmlInit(void) { return nvmlInitWithFlags(0); }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) {
    if (!references)
        return UNINITIALIZED;
    references--;
    return SUCCESS;
}

const char *nvmlErrorString(int status) {
    return status == SUCCESS         ? "Success"
           : status == UNINITIALIZED ? "Uninitialized"
           : status == NOT_SUPPORTED ? "Not Supported"
           : status == NOT_FOUND     ? "Not Found"
                                     : "Invalid Argument";
}

static int text(const char *value, char *out, unsigned bytes) {
    if (strlen(value) >= bytes)
        return INSUFFICIENT_SIZE;
    strcpy(out, value);
    return SUCCESS;
}

int nvmlSystemGetDriverVersion(char *out, unsigned bytes) { return text("580.00", out, bytes); }
int nvmlSystemGetNVMLVersion(char *out, unsigned bytes) { return text("13.580.00", out, bytes); }

int nvmlSystemGetCudaDriverVersion(int *out) {
    *out = 13000;
    return SUCCESS;
}

int nvmlSystemGetCudaDriverVersion_v2(int *out) { return nvmlSystemGetCudaDriverVersion(out); }

int nvmlDeviceGetCount_v2(unsigned *out) {
    if (!references)
        return UNINITIALIZED;
    *out = (unsigned)machine_device_count();
    return SUCCESS;
}

int nvmlDeviceGetCount(unsigned *out) { return nvmlDeviceGetCount_v2(out); }

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Handle *out) {
    *out = machine_device((int)index);
    return !references ? UNINITIALIZED : *out ? SUCCESS : INVALID_ARGUMENT;
}

int nvmlDeviceGetHandleByIndex(unsigned index, Handle *out) {
    return nvmlDeviceGetHandleByIndex_v2(index, out);
}

static void write_uuid(Handle device, char out[41]) {
    unsigned char raw[16];
    int length = sprintf(out, "GPU-");
    device_uuid(device, raw);
    for (int i = 0; i < 16; i++)
        length += sprintf(out + length, i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", raw[i]);
}

int nvmlDeviceGetUUID(Handle device, char *out, unsigned bytes) {
    char uuid[41];
    write_uuid(device, uuid);
    return text(uuid, out, bytes);
}

int nvmlDeviceGetHandleByUUID(const char *wanted, Handle *out) {
    char uuid[41];
    for (int number = 0; number < machine_device_count(); number++) {
        write_uuid(*out = machine_device(number), uuid);
        if (!strcmp(uuid, wanted))
            return SUCCESS;
    }
    return NOT_FOUND;
}

int nvmlDeviceGetHandleByPciBusId_v2(const char *bus, Handle *out) {
    unsigned domain, number;
    if (sscanf(bus, "%x:%x:", &domain, &number) != 2)
        return INVALID_ARGUMENT;
    *out = machine_device((int)number - 1);
    return *out ? SUCCESS : NOT_FOUND;
}

int nvmlDeviceGetHandleByPciBusId(const char *bus, Handle *out) {
    return nvmlDeviceGetHandleByPciBusId_v2(bus, out);
}

typedef struct {
    char legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char id[32];
} Pci;

int nvmlDeviceGetPciInfo_v3(Handle device, Pci *out) {
    *out = (Pci){.bus = (unsigned)device->number + 1};
    snprintf(out->legacy, sizeof out->legacy, "0000:%02X:00.0", out->bus);
    snprintf(out->id, sizeof out->id, "00000000:%02X:00.0", out->bus);
    return SUCCESS;
}

int nvmlDeviceGetPciInfo_v2(Handle device, Pci *out) { return nvmlDeviceGetPciInfo_v3(device, out); }

int nvmlDeviceGetName(Handle device, char *out, unsigned bytes) {
    return text(device->name, out, bytes);
}

int nvmlDeviceGetIndex(Handle device, unsigned *out) {
    *out = (unsigned)device->number;
    return SUCCESS;
}

int nvmlDeviceGetMinorNumber(Handle device, unsigned *out) { return nvmlDeviceGetIndex(device, out); }

int nvmlDeviceGetCudaComputeCapability(Handle device, int *major, int *minor) {
    *major = device->major;
    *minor = device->minor;
    return SUCCESS;
}

typedef struct {
    uint64_t total, free, used;
} MemoryV1;

typedef struct {
    unsigned version;
    uint64_t total, reserved, free, used;
} MemoryV2;

int nvmlDeviceGetMemoryInfo(Handle device, MemoryV1 *out) {
    if (!references)
        return UNINITIALIZED;
    out->total = device->total_bytes;
    out->used = machine_device_used_bytes(device->number);
    out->free = out->total > out->used ? out->total - out->used : 0;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(Handle device, MemoryV2 *out) {
    MemoryV1 first;
    if (out->version != (sizeof(MemoryV2) | 2u << 24))
        return ARGUMENT_VERSION_MISMATCH;
    int status = nvmlDeviceGetMemoryInfo(device, &first);
    if (status == SUCCESS)
        *out = (MemoryV2){out->version, first.total, 0, first.free, first.used};
    return status;
}

int nvmlDeviceGetComputeRunningProcesses(Handle device, unsigned *count, void *processes) {
    (void)device, (void)processes;
    *count = 0;
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v2(Handle device, unsigned *count, void *processes) {
    return nvmlDeviceGetComputeRunningProcesses(device, count, processes);
}

int nvmlDeviceGetComputeRunningProcesses_v3(Handle device, unsigned *count, void *processes) {
    return nvmlDeviceGetComputeRunningProcesses(device, count, processes);
}

#define NOT_ANSWERED(name) \
    int name(void) { return NOT_SUPPORTED; }

NOT_ANSWERED(nvmlDeviceGetMigMode)
NOT_ANSWERED(nvmlDeviceGetMaxMigDeviceCount)
NOT_ANSWERED(nvmlDeviceGetMigDeviceHandleByIndex)
NOT_ANSWERED(nvmlDeviceGetUtilizationRates)
NOT_ANSWERED(nvmlDeviceGetPowerUsage)
NOT_ANSWERED(nvmlDeviceGetEnforcedPowerLimit)
NOT_ANSWERED(nvmlDeviceGetTotalEnergyConsumption)
NOT_ANSWERED(nvmlDeviceGetTemperature)
NOT_ANSWERED(nvmlDeviceGetPcieThroughput)
NOT_ANSWERED(nvmlDeviceGetClockInfo)
NOT_ANSWERED(nvmlDeviceGetMaxClockInfo)
NOT_ANSWERED(nvmlDeviceGetFanSpeed)
NOT_ANSWERED(nvmlDeviceGetPerformanceState)
NOT_ANSWERED(nvmlDeviceGetNvLinkState)
NOT_ANSWERED(nvmlDeviceGetNvLinkCapability)
NOT_ANSWERED(nvmlDeviceGetNvLinkRemoteDeviceType)
NOT_ANSWERED(nvmlDeviceGetNvLinkRemotePciInfo_v2)
NOT_ANSWERED(nvmlDeviceGetTopologyCommonAncestor)
NOT_ANSWERED(nvmlDeviceGetGraphicsRunningProcesses)
