/*
 * metrics_process: statistics of the process and the machine from /proc, and of GPUs from NVIDIA's
 * management library (NVML). The library is loaded at run time, not linked: most machines lack it,
 * and without it only the GPU metrics are missing.
 */
#define _GNU_SOURCE
#include "ops/ops.h"

#include "base/base.h"

#include <dirent.h>
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

/* The number after `key` at the start of a line of a file in /proc, or -1. */
static double read_number_after(const char *path, const char *key) {
    char line[512];
    double v = -1;
    FILE *f = fopen(path, "re");
    while (f && v < 0 && fgets(line, sizeof line, f))
        if (strncmp(line, key, strlen(key)) == 0) v = strtod(line + strlen(key), NULL);
    if (f) fclose(f);
    return v;
}

static double count_fds(void) {
    DIR *d = opendir("/proc/self/fd");
    int n = -3; /* without ".", ".." and the descriptor of this folder */
    if (!d) return -1;
    while (readdir(d)) n++;
    closedir(d);
    return n;
}

/* Fields of /proc/self/stat, numbered as in proc(5). The second field is a name that may contain
 * spaces and parentheses, so stat_read counts from the last parenthesis on. */
enum { MINOR = 10, MAJOR = 12, USER = 14, SYSTEM = 15, THREADS = 20, START = 22, SIZE, RESIDENT };

static bool stat_read(double field[RESIDENT + 1]) {
    char text[2048] = "";
    FILE *f = fopen("/proc/self/stat", "re");
    size_t n = f ? fread(text, 1, sizeof text - 1, f) : 0;
    if (f) fclose(f);
    text[n] = 0;
    char *at = strrchr(text, ')');
    if (!at || strlen(at) < 4) return false;
    at += 3; /* ") R": the third field is a letter */
    for (int i = 4; i <= RESIDENT; i++) field[i] = strtod(at, &at);
    return true;
}

struct process_stats process_read(void) {
    struct process_stats s = {-1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1};
    double v[RESIDENT + 1], ticks = (double)sysconf(_SC_CLK_TCK), boot;
    struct rlimit limit;
    if (stat_read(v)) {
        s.cpu = (v[USER] + v[SYSTEM]) / ticks;
        s.resident = v[RESIDENT] * (double)sysconf(_SC_PAGESIZE);
        s.virtual_bytes = v[SIZE];
        s.threads = v[THREADS];
        s.minor_faults = v[MINOR];
        s.major_faults = v[MAJOR];
        boot = read_number_after("/proc/stat", "btime ");
        if (boot >= 0) s.start = boot + v[START] / ticks;
    }
    s.fds = count_fds();
    if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY)
        s.max_fds = (double)limit.rlim_cur;
    struct memory_info m = memory_info("/");
    s.host_memory = (double)m.total;
    s.host_available = (double)m.available;
    return s;
}

/* Types of NVML, laid out as in its binary interface. */
typedef struct nvml_device *nvml_device;
struct nvml_memory {
    unsigned long long total, free, used;
};
struct nvml_rates {
    unsigned gpu, memory; /* percent */
};

struct nvml {
    void *library;
    int (*init)(void);
    int (*shutdown)(void);
    int (*count)(unsigned *n);
    int (*device)(unsigned i, nvml_device *out);
    int (*rates)(nvml_device d, struct nvml_rates *out);
    int (*memory)(nvml_device d, struct nvml_memory *out);
};

/* Sets the function pointer at `function` to the symbol. dlsym returns a data pointer for functions
 * too; C has no conversion of it to a function pointer, so its bits are copied. */
static bool load_symbol(const struct nvml *g, const char *name, void *function) {
    void *address = dlsym(g->library, name);
    memcpy(function, &address, sizeof address);
    return address != NULL;
}

static bool load_symbols(struct nvml *g) {
    return load_symbol(g, "nvmlInit_v2", &g->init) &&
           load_symbol(g, "nvmlShutdown", &g->shutdown) &&
           load_symbol(g, "nvmlDeviceGetCount_v2", &g->count) &&
           load_symbol(g, "nvmlDeviceGetHandleByIndex_v2", &g->device) &&
           load_symbol(g, "nvmlDeviceGetUtilizationRates", &g->rates) &&
           load_symbol(g, "nvmlDeviceGetMemoryInfo", &g->memory);
}

struct nvml *nvml_open(void) {
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) return NULL;
    struct nvml *g = xcalloc(1, sizeof *g);
    g->library = library;
    if (load_symbols(g) && g->init() == 0) return g;
    dlclose(library);
    free(g);
    return NULL;
}

void nvml_close(struct nvml *g) {
    if (!g) return;
    g->shutdown();
    dlclose(g->library);
    free(g);
}

int nvml_read(struct nvml *g, struct gpu_stats out[GPUS_MAX]) {
    unsigned n = 0;
    if (!g || g->count(&n) != 0) return 0;
    n = MIN(n, (unsigned)GPUS_MAX);
    for (unsigned i = 0; i < n; i++) {
        nvml_device d = NULL;
        struct nvml_rates rates;
        struct nvml_memory memory;
        out[i] = (struct gpu_stats){-1, -1, -1};
        if (g->device(i, &d) != 0) continue;
        if (g->rates(d, &rates) == 0) out[i].utilization = MIN(rates.gpu, 100u) / 100.0;
        if (g->memory(d, &memory) != 0) continue;
        out[i].used = (double)memory.used;
        out[i].total = (double)memory.total;
    }
    return (int)n;
}
