/* Stands in for libnvidia-ml.so.1 in tests: the binary interface of the functions that shardscale
 * calls, answering from a script. Own declarations, written from NVML's public reference.
 *
 * $NVML_STUB_SCRIPT names a text file, read at the process's first nvmlInit. A line is
 *     <device> <question> <answer> [<answer> ...]
 * with a device number or `*` for all; `*` also stands for the library itself. Each call takes the
 * next answer, the last one stays. An answer is a word or number, `!<n>` for nvmlReturn_t <n>, or
 * `hang` for a call that never comes back. What the script leaves out is NOT_SUPPORTED (3).
 *
 * Questions of the library: init, count, shutdown.
 * Questions of a device: handle (may only fail), uuid, mig_mode, mig_parent (makes the device a MIG
 * instance of another), total, used, reserved, gpu_busy, memory_busy, power, energy, temperature,
 * pcie_tx, pcie_rx; v2 (may only fail) before the second version of the memory call.
 *
 * Build with -DWITHOUT_MEMORY_V2 for a library too old to have that version.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    SUCCESS = 0,
    UNINITIALIZED = 1,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    ARGUMENT_VERSION_MISMATCH = 25,
};
enum { MAX_LINES = 512, MAX_ANSWERS = 64, MAX_DEVICES = 64, LIBRARY = -1, NO_LINE = -1 };

typedef struct {
    int number;
} Device;

typedef struct {
    int device; /* LIBRARY for `*` */
    char *question;
    char *answers[MAX_ANSWERS];
    int count, next;
} Line;

static Line lines[MAX_LINES];
static int line_count, references;
static Device devices[MAX_DEVICES];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static void read_script(void) {
    const char *path = getenv("NVML_STUB_SCRIPT");
    FILE *file = path ? fopen(path, "r") : NULL;
    char *text = NULL;
    size_t capacity = 0;
    while (file && line_count < MAX_LINES && getline(&text, &capacity, file) > 0) {
        char *rest = strdup(text), *device = strsep(&rest, " \n");
        Line *line = &lines[line_count];
        char *word;
        if (!*device || *device == '#')
            continue;
        memset(line, 0, sizeof *line);
        line->device = *device == '*' ? LIBRARY : atoi(device);
        line->question = strsep(&rest, " \n");
        while ((word = strsep(&rest, " \n")) && line->count < MAX_ANSWERS)
            if (*word)
                line->answers[line->count++] = word;
        line_count++;
    }
    free(text);
    if (file)
        fclose(file);
}

/* The script's next answer; a line for the device itself goes before one for all. */
static int look_up(int device, const char *question, const char **answer) {
    Line *found = NULL;
    const char *word = NULL;
    pthread_mutex_lock(&mutex);
    for (int i = 0; i < line_count; i++)
        if (!strcmp(lines[i].question, question)
            && (lines[i].device == device || (lines[i].device == LIBRARY && !found)))
            found = &lines[i];
    if (found) {
        word = found->answers[found->next];
        if (found->next < found->count - 1)
            found->next++;
    }
    pthread_mutex_unlock(&mutex);
    if (!word)
        return NO_LINE;
    while (!strcmp(word, "hang"))
        pause();
    if (*word == '!')
        return atoi(word + 1);
    *answer = word;
    return SUCCESS;
}

static int ask(int device, const char *question, const char **answer) {
    int status = look_up(device, question, answer);
    return status == NO_LINE ? NOT_SUPPORTED : status;
}

static int ask_number(int device, const char *question, uint64_t *value) {
    const char *word;
    int status = ask(device, question, &word);
    if (status == SUCCESS)
        *value = strtoull(word, NULL, 10);
    return status;
}

/* Errors of questions that need no answer: a script without them means success. */
static int may_fail(int device, const char *question) {
    const char *word;
    int status = look_up(device, question, &word);
    return status == NO_LINE ? SUCCESS : status;
}

static int ask_u32(Device *device, const char *question, uint32_t *out) {
    uint64_t value;
    int status;
    if (!references)
        return UNINITIALIZED;
    status = ask_number(device->number, question, &value);
    if (status == SUCCESS)
        *out = (uint32_t)value;
    return status;
}

static int parent_of(int device) {
    uint64_t parent;
    return ask_number(device, "mig_parent", &parent) == SUCCESS ? (int)parent : -1;
}

static int give_handle(int number, Device **out) {
    int status = may_fail(number, "handle");
    if (status == SUCCESS) {
        devices[number].number = number;
        *out = &devices[number];
    }
    return status;
}

/* For tests, not part of NVML: how many nvmlInit are without their nvmlShutdown. */
int stub_references(void) { return references; }

int nvmlInitWithFlags(unsigned flags) {
    int status;
    (void)flags;
    pthread_mutex_lock(&mutex);
    if (!line_count)
        read_script();
    pthread_mutex_unlock(&mutex);
    status = may_fail(LIBRARY, "init");
    if (status == SUCCESS)
        references++;
    return status;
}

int nvmlShutdown(void) {
    int status;
    if (!references)
        return UNINITIALIZED;
    status = may_fail(LIBRARY, "shutdown");
    if (status == SUCCESS)
        references--;
    return status;
}

const char *nvmlErrorString(int status) {
    (void)status;
    return "an error of the stub";
}

int nvmlDeviceGetCount_v2(unsigned *out) {
    Device library = {LIBRARY};
    return ask_u32(&library, "count", out);
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, Device **out) {
    unsigned count;
    int status = nvmlDeviceGetCount_v2(&count);
    if (status != SUCCESS)
        return status;
    return index < count ? give_handle((int)index, out) : INVALID_ARGUMENT;
}

int nvmlDeviceGetHandleByUUID(const char *wanted, Device **out) {
    if (!references)
        return UNINITIALIZED;
    for (int number = 0; number < MAX_DEVICES; number++) {
        const char *uuid;
        if (ask(number, "uuid", &uuid) == SUCCESS && !strcmp(uuid, wanted))
            return give_handle(number, out);
    }
    return NOT_FOUND;
}

int nvmlDeviceGetUUID(Device *device, char *out, unsigned size) {
    const char *uuid;
    int status = references ? ask(device->number, "uuid", &uuid) : UNINITIALIZED;
    if (status != SUCCESS)
        return status;
    if (strlen(uuid) >= size)
        return INSUFFICIENT_SIZE;
    strcpy(out, uuid);
    return SUCCESS;
}

int nvmlDeviceGetMigMode(Device *device, unsigned *current, unsigned *pending) {
    int status;
    if (parent_of(device->number) >= 0)
        return INVALID_ARGUMENT;
    status = ask_u32(device, "mig_mode", current);
    *pending = *current;
    return status;
}

int nvmlDeviceGetMaxMigDeviceCount(Device *device, unsigned *out) {
    (void)device;
    *out = 7;
    return SUCCESS;
}

int nvmlDeviceGetMigDeviceHandleByIndex(Device *device, unsigned index, Device **out) {
    unsigned position = 0;
    for (int number = 0; number < MAX_DEVICES; number++)
        if (parent_of(number) == device->number && position++ == index)
            return give_handle(number, out);
    return NOT_FOUND;
}

typedef struct {
    uint64_t total, free, used;
} MemoryV1;

typedef struct {
    unsigned version;
    uint64_t total, reserved, free, used;
} MemoryV2;

static int memory(Device *device, MemoryV2 *out) {
    int status;
    out->reserved = 0;
    if (!references)
        return UNINITIALIZED;
    if ((status = ask_number(device->number, "used", &out->used)) != SUCCESS
        || (status = ask_number(device->number, "total", &out->total)) != SUCCESS)
        return status;
    ask_number(device->number, "reserved", &out->reserved);
    out->free = out->total - out->used - out->reserved;
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo(Device *device, MemoryV1 *out) {
    MemoryV2 info;
    int status = memory(device, &info);
    if (status != SUCCESS)
        return status;
    out->total = info.total;
    out->free = info.free;
    out->used = info.used + info.reserved;
    return SUCCESS;
}

#ifndef WITHOUT_MEMORY_V2
int nvmlDeviceGetMemoryInfo_v2(Device *device, MemoryV2 *out) {
    int status = may_fail(device->number, "v2");
    if (status != SUCCESS)
        return status;
    if (out->version != (sizeof(MemoryV2) | 2u << 24))
        return ARGUMENT_VERSION_MISMATCH;
    return memory(device, out);
}
#endif

typedef struct {
    unsigned gpu, memory;
} Utilization;

int nvmlDeviceGetUtilizationRates(Device *device, Utilization *out) {
    int status = ask_u32(device, "gpu_busy", &out->gpu);
    return status == SUCCESS ? ask_u32(device, "memory_busy", &out->memory) : status;
}

int nvmlDeviceGetPowerUsage(Device *device, unsigned *out) { return ask_u32(device, "power", out); }

int nvmlDeviceGetTotalEnergyConsumption(Device *device, unsigned long long *out) {
    uint64_t value;
    int status = references ? ask_number(device->number, "energy", &value) : UNINITIALIZED;
    if (status == SUCCESS)
        *out = value;
    return status;
}

int nvmlDeviceGetTemperature(Device *device, int sensor, unsigned *out) {
    return sensor == 0 ? ask_u32(device, "temperature", out) : INVALID_ARGUMENT;
}

int nvmlDeviceGetPcieThroughput(Device *device, int counter, unsigned *out) {
    return ask_u32(device, counter == 0 ? "pcie_tx" : "pcie_rx", out);
}
