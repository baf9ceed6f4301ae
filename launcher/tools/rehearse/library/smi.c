/* nvidia-smi, for programs that ask it what GPUs there are: `-L`, and `--query-gpu` as CSV. Memory is
 * as before the program has taken any; what only a real GPU can answer is [N/A]. */
#include "device.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool nounits;

static void print_mib(size_t bytes) { printf(nounits ? "%zu" : "%zu MiB", bytes >> 20); }

static void print_uuid(const Device *of) {
    unsigned char raw[16];
    device_uuid(of, raw);
    printf("GPU-");
    for (int i = 0; i < 16; i++)
        printf(i == 4 || i == 6 || i == 8 || i == 10 ? "-%02x" : "%02x", raw[i]);
}

static void print_field(const Device *of, const char *field) {
    if (!strcmp(field, "index"))
        printf("%d", of->number);
    else if (!strcmp(field, "count"))
        printf("%d", machine_device_count());
    else if (!strcmp(field, "name") || !strcmp(field, "gpu_name"))
        printf("%s", of->name);
    else if (!strcmp(field, "uuid") || !strcmp(field, "gpu_uuid"))
        print_uuid(of);
    else if (!strcmp(field, "memory.total") || !strcmp(field, "memory.free"))
        print_mib(of->total_bytes);
    else if (!strcmp(field, "memory.used"))
        print_mib(0);
    else if (!strcmp(field, "compute_cap"))
        printf("%d.%d", of->major, of->minor);
    else if (!strcmp(field, "driver_version"))
        printf("580.00");
    else if (!strcmp(field, "pci.bus_id") || !strcmp(field, "gpu_bus_id"))
        printf("00000000:%02X:00.0", of->number + 1);
    else
        printf("[N/A]");
}

/* One line of CSV: a GPU's, or that of names. */
static void print_line(const Device *of, const char *fields) {
    char *copy = strdup(fields), *rest = copy, *field;
    for (bool first = true; (field = strsep(&rest, ",")); first = false) {
        field += strspn(field, " ");
        if (!first)
            printf(", ");
        if (of)
            print_field(of, field);
        else
            printf("%s%s", field, !strncmp(field, "memory.", 7) && !nounits ? " [MiB]" : "");
    }
    printf("\n");
    free(copy);
}

static const char *value(const char *word, const char *name) {
    size_t length = strlen(name);
    return !strncmp(word, name, length) && word[length] == '=' ? word + length + 1 : NULL;
}

int main(int count, char **words) {
    const char *fields = NULL, *only = NULL;
    bool noheader = false, list = false;
    for (int i = 1; i < count; i++) {
        const char *found;
        if (!strcmp(words[i], "-L") || !strcmp(words[i], "--list-gpus"))
            list = true;
        else if ((found = value(words[i], "--query-gpu")))
            fields = found;
        else if ((found = value(words[i], "--format"))) {
            noheader = strstr(found, "noheader");
            nounits = strstr(found, "nounits");
        } else if ((found = value(words[i], "--id")) || (found = value(words[i], "-i")))
            only = found;
        else if ((!strcmp(words[i], "-i") || !strcmp(words[i], "--id")) && i + 1 < count)
            only = words[++i];
        else {
            fprintf(stderr, "shardscale: the null GPU's nvidia-smi has no %s: it answers -L, and "
                    "--query-gpu=... --format=csv\n", words[i]);
            return 2;
        }
    }
    if (!fields && !list)
        printf("The null GPU of shardscale: no kernels run.\n");
    if (fields && !noheader)
        print_line(NULL, fields);
    for (int number = 0; number < machine_device_count(); number++) {
        const Device *of = machine_device(number);
        if (only && atoi(only) != number)
            continue;
        if (fields) {
            print_line(of, fields);
            continue;
        }
        printf("GPU %d: %s (UUID: ", number, of->name);
        print_uuid(of);
        printf(")\n");
    }
    return 0;
}
