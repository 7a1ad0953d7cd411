/*
 * seccomp: a system call filter in the form that bwrap reads.
 *
 * Programs in a sandbox compute, read and write. The filter denies (EPERM) system calls that they
 * do not need and that kernel exploits have used: tracing, mounting, modules, keys, bpf, io_uring,
 * user namespaces, and inserting input into a terminal (TIOCSTI). No guarantee of the sandbox
 * depends on the filter alone. clone3 takes its flags in memory, which a filter cannot see, so the
 * filter reports clone3 as missing (ENOSYS), and the C library then uses clone.
 */
#define _GNU_SOURCE
#include "sandbox/internal.h"

#include <assert.h>
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <stddef.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>

#if defined __x86_64__
#define ARCH AUDIT_ARCH_X86_64
#elif defined __aarch64__
#define ARCH AUDIT_ARCH_AARCH64
#endif

#define RETURN(what) BPF_STMT(BPF_RET | BPF_K, (what))
#define ALLOW RETURN(SECCOMP_RET_ALLOW)

#ifndef ARCH

size_t seccomp_filter(uint8_t out[SECCOMP_FILTER_MAX]) {
    const struct sock_filter allow = ALLOW;
    memcpy(out, &allow, sizeof allow);
    return sizeof allow;
}

#else

/* Numbers of system calls. From 424 on they are the same on all architectures; older headers lack
 * the newest of them. */
enum {
    CALL_IO_URING_SETUP = 425,
    CALL_IO_URING_ENTER,
    CALL_IO_URING_REGISTER,
    CALL_OPEN_TREE,
    CALL_MOVE_MOUNT,
    CALL_FSOPEN,
    CALL_FSCONFIG,
    CALL_FSMOUNT,
    CALL_FSPICK,
    CALL_CLONE3 = 435,
    CALL_PIDFD_GETFD = 438,
    CALL_MOUNT_SETATTR = 442,
    CALL_QUOTACTL_FD = 443,
    CALL_OPEN_TREE_ATTR = 467,
};

static const uint32_t denied[] = {
    /* other processes' memory and descriptors */
    SYS_ptrace,
    SYS_process_vm_readv,
    SYS_process_vm_writev,
    CALL_PIDFD_GETFD,
    SYS_kcmp,
    /* namespaces and mounts */
    SYS_unshare,
    SYS_setns,
    SYS_mount,
    SYS_umount2,
    SYS_pivot_root,
    SYS_chroot,
    CALL_OPEN_TREE,
    CALL_MOVE_MOUNT,
    CALL_FSOPEN,
    CALL_FSCONFIG,
    CALL_FSMOUNT,
    CALL_FSPICK,
    CALL_MOUNT_SETATTR,
    CALL_OPEN_TREE_ATTR,
    /* the kernel itself, and interfaces with many past exploits */
    SYS_bpf,
    SYS_perf_event_open,
    SYS_userfaultfd,
    CALL_IO_URING_SETUP,
    CALL_IO_URING_ENTER,
    CALL_IO_URING_REGISTER,
    SYS_add_key,
    SYS_request_key,
    SYS_keyctl,
    SYS_init_module,
    SYS_finit_module,
    SYS_delete_module,
    SYS_kexec_load,
    SYS_kexec_file_load,
    SYS_reboot,
    SYS_syslog,
    SYS_acct,
    SYS_swapon,
    SYS_swapoff,
    SYS_quotactl,
    CALL_QUOTACTL_FD,
    SYS_vhangup,
    /* files by handle, without access to their folders */
    SYS_open_by_handle_at,
    SYS_name_to_handle_at,
    /* the system clock */
    SYS_settimeofday,
    SYS_clock_settime,
    SYS_adjtimex,
    SYS_clock_adjtime,
    /* memory outside of all limits */
    SYS_shmget,
    SYS_msgget,
#ifdef __x86_64__
    SYS_modify_ldt,
    SYS_iopl,
    SYS_ioperm,
#endif
};

#define LOAD(field) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
/* Skips the next n instructions unless the loaded value equals `value`. */
#define SKIP_UNLESS(value, n) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (value), 0, (n))
#define DENY RETURN(SECCOMP_RET_ERRNO | EPERM)
/* Loads the low 32 bits of argument i, which come first because both architectures are
 * little-endian. */
#define ARG(i) LOAD(args[i])

/* System calls of another architecture have other numbers: they kill the program. */
static const struct sock_filter head[] = {
    LOAD(arch),
    SKIP_UNLESS(ARCH, 1),
    BPF_STMT(BPF_JMP | BPF_JA, 1),
    RETURN(SECCOMP_RET_KILL_PROCESS),
    LOAD(nr),
#ifdef __x86_64__
    BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, 0x40000000, 0, 1), /* numbers of the x32 ABI */
    DENY,
#endif
    SKIP_UNLESS(CALL_CLONE3, 1),
    RETURN(SECCOMP_RET_ERRNO | ENOSYS),
    SKIP_UNLESS(SYS_clone, 4),
    ARG(0),
    BPF_JUMP(BPF_JMP | BPF_JSET | BPF_K, CLONE_NEWUSER, 0, 1),
    DENY,
    ALLOW,
    SKIP_UNLESS(SYS_ioctl, 4),
    ARG(1),
    SKIP_UNLESS(TIOCSTI, 1),
    DENY,
    ALLOW,
};

static size_t filter_append(uint8_t *out, size_t size, struct sock_filter f) {
    memcpy(out + size, &f, sizeof f);
    return size + sizeof f;
}

size_t seccomp_filter(uint8_t out[SECCOMP_FILTER_MAX]) {
    static_assert(sizeof head + (2 * ARRAY_LEN(denied) + 1) * sizeof *head <= SECCOMP_FILTER_MAX,
                  "room");
    size_t n = sizeof head;
    memcpy(out, head, sizeof head);
    for (size_t i = 0; i < ARRAY_LEN(denied); i++) {
        n = filter_append(out, n, (struct sock_filter)SKIP_UNLESS(denied[i], 1));
        n = filter_append(out, n, (struct sock_filter)DENY);
    }
    return filter_append(out, n, (struct sock_filter)ALLOW);
}

#endif
