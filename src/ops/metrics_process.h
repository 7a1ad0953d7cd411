/*
 * metrics_process: what the system says of this process, of the machine and of its GPUs, for
 * metrics.c, which asks whenever metrics are read. A figure that the system does not give is
 * negative. process_read may be called by any thread, nvml_read by one at a time.
 */
#ifndef SHOAL_METRICS_PROCESS_H
#define SHOAL_METRICS_PROCESS_H

struct process_state {
    double cpu, start;          /* seconds: of user and system together; since 1970 */
    double resident, addresses; /* bytes */
    double threads, minor_faults, major_faults, fds, max_fds;
    double host_memory, host_available; /* bytes */
};
struct process_state process_read(void);

enum { GPUS_MAX = 16 }; /* more are not looked at */
struct gpu_stats {
    double busy, used, total; /* 0 to 1, bytes, bytes */
};
struct nvml *nvml_open(void); /* NVIDIA's; NULL: none, or their library is not there */
void nvml_close(struct nvml *g);
int nvml_read(struct nvml *g, struct gpu_stats out[GPUS_MAX]); /* how many there are */

#endif
