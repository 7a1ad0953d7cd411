/*
 * landlock: confines this process. It uses raw system calls, because C libraries have no functions
 * for them.
 *
 * Access rights that the kernel does not know are left out of the rules. A right that it knows is
 * denied unless a rule allows it. A rule for a file has only the rights that apply to files.
 */
#define _GNU_SOURCE
#include "sandbox/internal.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

/* The constants LANDLOCK_* of linux/landlock.h (ABI 7), under shorter names. The header itself is
 * not used, because installed headers are often older than the kernel. */
enum {
    CALL_CREATE_RULESET = 444,
    CALL_ADD_RULE,
    CALL_RESTRICT_SELF,
    CREATE_VERSION = 1,
    RULE_PATH_BENEATH = 1,
};
#define FS_EXECUTE (1ull << 0)
#define FS_WRITE_FILE (1ull << 1)
#define FS_READ_FILE (1ull << 2)
#define FS_READ_DIR (1ull << 3)
#define FS_REFER (1ull << 13)
#define FS_TRUNCATE (1ull << 14)
#define FS_IOCTL_DEV (1ull << 15)
#define FS_ABI_1 ((1ull << 13) - 1)
#define NET_TCP 3ull   /* bind, connect: no rule allows them */
#define SCOPE_ALL 3ull /* abstract sockets, signals */
#define FS_OF_FILES (FS_EXECUTE | FS_WRITE_FILE | FS_READ_FILE | FS_TRUNCATE | FS_IOCTL_DEV)
#define FS_READ (FS_EXECUTE | FS_READ_FILE | FS_READ_DIR)

struct ruleset_attr {
    uint64_t fs, net, scoped;
};
struct path_rule {
    uint64_t allowed;
    int32_t fd;
} __attribute__((packed));

static atomic_bool confined;

bool sandbox_is_confined(void) {
    return atomic_load(&confined);
}

int sandbox_landlock_abi(void) {
    long abi = syscall(CALL_CREATE_RULESET, NULL, 0, CREATE_VERSION);
    return abi > 0 ? (int)abi : 0;
}

/* The rights that this ABI of landlock can deny. *size: the size of the struct in this ABI. */
static struct ruleset_attr handled_rights(int abi, size_t *size) {
    struct ruleset_attr a = {.fs = FS_ABI_1};
    if (abi >= 2) a.fs |= FS_REFER;
    if (abi >= 3) a.fs |= FS_TRUNCATE;
    if (abi >= 5) a.fs |= FS_IOCTL_DEV;
    if (abi >= 4) a.net = NET_TCP;
    if (abi >= 6) a.scoped = SCOPE_ALL;
    *size = abi >= 6 ? sizeof a : abi >= 4 ? 16 : 8;
    return a;
}

static int rule_add(int ruleset, const char *path, uint64_t rights, struct error *err) {
    struct path_rule r = {.allowed = rights, .fd = open(path, O_PATH | O_CLOEXEC)};
    struct stat st;
    if (r.fd < 0) return error_errno(err, "'%s' cannot be opened", path);
    int rc = fstat(r.fd, &st) == 0 ? OK : error_errno(err, "'%s' cannot be read", path);
    if (!rc && !S_ISDIR(st.st_mode)) r.allowed &= FS_OF_FILES;
    if (!rc && syscall(CALL_ADD_RULE, ruleset, RULE_PATH_BENEATH, &r, 0) != 0)
        rc = error_errno(err, "landlock cannot allow '%s'", path);
    close(r.fd);
    return rc;
}

static int rules_add(int ruleset, const struct strings *paths, uint64_t rights, struct error *err) {
    for (int i = 0; paths && i < paths->n; i++)
        if (rule_add(ruleset, paths->v[i], rights, err) != OK) return err->code;
    return OK;
}

/* Allows reading and executing the system's programs and libraries, reading the files that the
 * loader, host name, user and time zone look-ups, TLS, fonts and this program's own metrics need,
 * and using the devices that have no data of others. */
static void system_rules_add(int ruleset, uint64_t handled_fs) {
    static const char *const read[] = {"/usr",
                                       "/bin",
                                       "/sbin",
                                       "/lib",
                                       "/lib32",
                                       "/lib64",
                                       "/etc/ld.so.cache",
                                       "/etc/ld.so.conf",
                                       "/etc/ld.so.conf.d",
                                       "/etc/ld.so.preload",
                                       "/etc/alternatives",
                                       "/etc/localtime",
                                       "/etc/timezone",
                                       "/etc/locale.alias",
                                       "/etc/nsswitch.conf",
                                       "/etc/passwd",
                                       "/etc/group",
                                       "/etc/hosts",
                                       "/etc/resolv.conf",
                                       "/etc/gai.conf",
                                       "/etc/host.conf",
                                       "/etc/ssl/certs",
                                       "/etc/ssl/openssl.cnf",
                                       "/etc/fonts",
                                       "/proc",
                                       "/sys/devices/system/cpu",
                                       "/sys/fs/cgroup"};
    static const char *const devices[] = {"/dev/null", "/dev/zero", "/dev/full", "/dev/random",
                                          "/dev/urandom"};
    struct error ignored; /* not every system has all of them */
    for (size_t i = 0; i < ARRAY_LEN(read); i++)
        rule_add(ruleset, read[i], FS_READ & handled_fs, &ignored);
    for (size_t i = 0; i < ARRAY_LEN(devices); i++)
        rule_add(ruleset, devices[i], (FS_READ_FILE | FS_WRITE_FILE | FS_TRUNCATE) & handled_fs,
                 &ignored);
}

static bool is_single_threaded(void) {
    DIR *d = opendir("/proc/self/task");
    int n = 0;
    for (const struct dirent *e; d && (e = readdir(d));) n += e->d_name[0] != '.';
    if (d) closedir(d);
    return n == 1;
}

/* Keeps those of root's capabilities that concern files, because landlock controls the access to
 * files. The other capabilities would allow loading modules, reading other processes' memory or
 * rebooting. */
static bool capabilities_restrict(void) {
    const uint32_t kept = 1u << CAP_CHOWN | 1u << CAP_DAC_OVERRIDE | 1u << CAP_DAC_READ_SEARCH |
                          1u << CAP_FOWNER | 1u << CAP_FSETID;
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct v[2] = {{0}};
    if (syscall(SYS_capget, &header, v) != 0) return false;
    v[0].effective &= kept;
    v[0].permitted &= kept;
    v[0].inheritable = 0;
    v[1] = (struct __user_cap_data_struct){0};
    return syscall(SYS_capset, &header, v) == 0;
}

static int restrict_self(int ruleset, struct error *err) {
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
        syscall(CALL_RESTRICT_SELF, ruleset, 0) == 0 && capabilities_restrict())
        return OK;
    return error_set(err, ERR_STATE, "this process cannot be confined: %s", strerror(errno));
}

int sandbox_confine(const struct strings *read, const struct strings *write, struct error *err) {
    int abi = sandbox_landlock_abi();
    size_t size;
    if (!abi)
        return error_set(err, ERR_STATE,
                         "the kernel has no landlock, which confines a process (Linux 5.13 or "
                         "newer, 'landlock' in /sys/kernel/security/lsm)");
    if (!is_single_threaded())
        return error_set(err, ERR_STATE, "a process with several threads cannot be confined");
    struct ruleset_attr all = handled_rights(abi, &size);
    int ruleset = (int)syscall(CALL_CREATE_RULESET, &all, size, 0);
    if (ruleset < 0)
        return error_set(err, ERR_STATE, "the landlock ruleset cannot be created: %s",
                         strerror(errno));
    system_rules_add(ruleset, all.fs);
    int rc = rules_add(ruleset, read, FS_READ & all.fs, err);
    if (!rc) rc = rules_add(ruleset, write, all.fs & ~FS_IOCTL_DEV, err);
    if (!rc) rc = restrict_self(ruleset, err);
    close(ruleset);
    if (!rc) atomic_store(&confined, true);
    return rc;
}
