// Preloaded into a command: counts its file calls below one folder and makes the n-th one go wrong.
// A call is what changes the folder (or opens a file of it). Everything outside the folder is passed through.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OFF, COUNT, KILL_BEFORE, KILL_AFTER, TORN, FAIL, FAIL_FROM_HERE };
enum { READS = 1, FREES = 2, SYNCS = 4 }; // what a full or read-only disk still lets through

static int mode = OFF, failure = 0, passes = 0, record = -1;
static long target = 0, seen = 0;
static char folder[PATH_MAX];

// Called by the command's own process before it begins. `passing`: kinds that still work in FAIL_FROM_HERE.
void fault_arm(long n, int how, int error, int passing, const char *below, int log_descriptor) {
    target = n, seen = 0, failure = error, passes = passing, record = log_descriptor;
    snprintf(folder, sizeof folder, "%s", below);
    mode = how;
}

static void full_name(int at, const char *path, char *out) {
    char base[PATH_MAX] = "", link[64];
    if (path && path[0] == '/') { snprintf(out, PATH_MAX, "%s", path); return; }
    if (at == AT_FDCWD) {
        if (!getcwd(base, sizeof base)) base[0] = 0;
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", at);
        ssize_t n = readlink(link, base, sizeof base - 1);
        base[n > 0 ? n : 0] = 0;
    }
    if (path) snprintf(out, PATH_MAX, "%.2000s/%.2000s", base, path);
    else snprintf(out, PATH_MAX, "%s", base);
}

static int is_below(const char *name) {
    size_t n = strlen(folder);
    return strncmp(name, folder, n) == 0 && (name[n] == '/' || name[n] == 0);
}

typedef struct { int fails, dies_after, is_torn; } Fate;

// What becomes of this call. `kind` says what a broken disk may still let through.
static Fate fate_of(const char *what, int kind, int at, const char *path) {
    Fate fate = {0, 0, 0};
    if (mode == OFF) return fate;
    int before = errno;
    char name[PATH_MAX];
    full_name(at, path, name);
    if (!is_below(name)) { errno = before; return fate; }
    long n = __atomic_add_fetch(&seen, 1, __ATOMIC_SEQ_CST);
    if (record >= 0) {
        char line[PATH_MAX + 64];
        int length = snprintf(line, sizeof line, "%d %s %s\n", kind, what, name + strlen(folder));
        syscall(SYS_write, record, line, length);
    }
    if (n == target && mode == KILL_BEFORE) kill(getpid(), SIGKILL);
    if (n == target && mode == KILL_AFTER) fate.dies_after = 1;
    if (n == target && mode == TORN) fate.is_torn = 1;
    if (n == target && mode == FAIL) fate.fails = failure;
    if (n >= target && mode == FAIL_FROM_HERE && !(kind & passes)) fate.fails = failure;
    errno = before;
    return fate;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define CALL(type, what, kind, at, path, real)                                     \
    Fate fate = fate_of(what, kind, at, path);                                     \
    if (fate.fails) { errno = fate.fails; return -1; }                             \
    type answer = real;                                                            \
    if (fate.dies_after || fate.is_torn) kill(getpid(), SIGKILL);                  \
    return answer;

#define WRITES(flags) ((flags) & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC))
#define MODE_OF(flags, m)                                                          \
    mode_t m = 0;                                                                  \
    if ((flags) & (O_CREAT | O_TMPFILE)) { va_list rest; va_start(rest, flags); m = va_arg(rest, mode_t); va_end(rest); }
#define OPEN_NAME(flags) (WRITES(flags) ? "open" : "read")
#define OPEN_KIND(flags) (WRITES(flags) ? 0 : READS)

int open(const char *p, int flags, ...) { MODE_OF(flags, m) CALL(int, OPEN_NAME(flags), OPEN_KIND(flags), AT_FDCWD, p, REAL(open)(p, flags, m)) }
int open64(const char *p, int flags, ...) { MODE_OF(flags, m) CALL(int, OPEN_NAME(flags), OPEN_KIND(flags), AT_FDCWD, p, REAL(open64)(p, flags, m)) }
int openat(int at, const char *p, int flags, ...) { MODE_OF(flags, m) CALL(int, OPEN_NAME(flags), OPEN_KIND(flags), at, p, REAL(openat)(at, p, flags, m)) }
int openat64(int at, const char *p, int flags, ...) { MODE_OF(flags, m) CALL(int, OPEN_NAME(flags), OPEN_KIND(flags), at, p, REAL(openat64)(at, p, flags, m)) }

// A torn write puts half of the bytes down and is the last thing the process does.
static ssize_t half(Fate fate, int f, const void *b, size_t n) {
    ssize_t answer = REAL(write)(f, b, fate.is_torn ? n / 2 : n);
    if (fate.dies_after || fate.is_torn) kill(getpid(), SIGKILL);
    return answer;
}

ssize_t write(int f, const void *b, size_t n) {
    Fate fate = fate_of("write", 0, f, NULL);
    if (fate.fails) { errno = fate.fails; return -1; }
    return half(fate, f, b, n);
}

ssize_t writev(int f, const struct iovec *v, int n) { CALL(ssize_t, "write", 0, f, NULL, REAL(writev)(f, v, n)) }
ssize_t pwrite(int f, const void *b, size_t n, off_t o) { CALL(ssize_t, "write", 0, f, NULL, REAL(pwrite)(f, b, n, o)) }
ssize_t pwrite64(int f, const void *b, size_t n, off64_t o) { CALL(ssize_t, "write", 0, f, NULL, REAL(pwrite64)(f, b, n, o)) }
ssize_t sendfile(int out, int in, off_t *o, size_t n) { CALL(ssize_t, "write", 0, out, NULL, REAL(sendfile)(out, in, o, n)) }
ssize_t sendfile64(int out, int in, off64_t *o, size_t n) { CALL(ssize_t, "write", 0, out, NULL, REAL(sendfile64)(out, in, o, n)) }
ssize_t copy_file_range(int in, off64_t *oi, int out, off64_t *oo, size_t n, unsigned x) { CALL(ssize_t, "write", 0, out, NULL, REAL(copy_file_range)(in, oi, out, oo, n, x)) }
int fsync(int f) { CALL(int, "fsync", SYNCS, f, NULL, REAL(fsync)(f)) }
int fdatasync(int f) { CALL(int, "fsync", SYNCS, f, NULL, REAL(fdatasync)(f)) }
int ftruncate(int f, off_t n) { CALL(int, "ftruncate", FREES, f, NULL, REAL(ftruncate)(f, n)) }
int ftruncate64(int f, off64_t n) { CALL(int, "ftruncate", FREES, f, NULL, REAL(ftruncate64)(f, n)) }
int rename(const char *a, const char *b) { CALL(int, "rename", 0, AT_FDCWD, b, REAL(rename)(a, b)) }
int renameat(int x, const char *a, int y, const char *b) { CALL(int, "rename", 0, y, b, REAL(renameat)(x, a, y, b)) }
int renameat2(int x, const char *a, int y, const char *b, unsigned z) { CALL(int, "rename", 0, y, b, REAL(renameat2)(x, a, y, b, z)) }
int unlink(const char *p) { CALL(int, "unlink", FREES, AT_FDCWD, p, REAL(unlink)(p)) }
int unlinkat(int at, const char *p, int x) { CALL(int, "unlink", FREES, at, p, REAL(unlinkat)(at, p, x)) }
int rmdir(const char *p) { CALL(int, "rmdir", FREES, AT_FDCWD, p, REAL(rmdir)(p)) }
int link(const char *a, const char *b) { CALL(int, "link", 0, AT_FDCWD, b, REAL(link)(a, b)) }
int linkat(int x, const char *a, int y, const char *b, int z) { CALL(int, "link", 0, y, b, REAL(linkat)(x, a, y, b, z)) }
int mkdir(const char *p, mode_t m) { CALL(int, "mkdir", 0, AT_FDCWD, p, REAL(mkdir)(p, m)) }
int mkdirat(int at, const char *p, mode_t m) { CALL(int, "mkdir", 0, at, p, REAL(mkdirat)(at, p, m)) }
