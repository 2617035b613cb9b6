// Preloaded into a command: counts its file calls below one folder and makes the n-th one go wrong.
// A call is what changes, reads or asks about the folder. Everything outside the folder is passed through.
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OFF, COUNT, KILL_BEFORE, KILL_AFTER, TORN, FAIL, FAIL_FROM_HERE, SHORT, SIGNAL };
enum { READS = 1, FREES = 2, SYNCS = 4, CLOSES = 8 }; // what a full or read-only disk still lets through

static int mode = OFF, failure = 0, passes = 0, record = -1;
static long target = 0, seen = 0;
static pid_t armed = 0; // programs that the command starts are not disturbed
static char folder[PATH_MAX];

// Called by the command's own process before it begins. `error`: an errno, or the number of a signal.
// `passing`: kinds that still work in FAIL_FROM_HERE.
void fault_arm(long n, int how, int error, int passing, const char *below, int log_descriptor) {
    target = n, seen = 0, failure = error, passes = passing, record = log_descriptor;
    snprintf(folder, sizeof folder, "%s", below);
    armed = getpid();
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
    if (path && path[0]) snprintf(out, PATH_MAX, "%.2000s/%.2000s", base, path);
    else snprintf(out, PATH_MAX, "%s", base);
}

static int is_below(const char *name) {
    size_t n = strlen(folder);
    return strncmp(name, folder, n) == 0 && (name[n] == '/' || name[n] == 0);
}

typedef struct { int fails, dies_after, is_torn, is_short; } Fate;

// What becomes of this call. `kind` says what a broken disk may still let through.
static Fate fate_of(const char *what, int kind, int at, const char *path) {
    Fate fate = {0, 0, 0, 0};
    if (mode == OFF || getpid() != armed) return fate;
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
    if (n == target && mode == SIGNAL) kill(getpid(), failure);
    if (n == target && mode == KILL_AFTER) fate.dies_after = 1;
    if (n == target && mode == TORN) fate.is_torn = 1;
    if (n == target && mode == SHORT) fate.is_short = 1;
    if (n == target && mode == FAIL) fate.fails = failure;
    if (n >= target && mode == FAIL_FROM_HERE && !(kind & passes)) fate.fails = failure;
    errno = before;
    return fate;
}

#define REAL(name) ({ static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name); real; })
#define ANSWER(type, bad, what, kind, at, path, call)                              \
    Fate fate = fate_of(what, kind, at, path);                                     \
    if (fate.fails) { errno = fate.fails; return bad; }                            \
    type answer = call;                                                            \
    if (fate.dies_after || fate.is_torn) kill(getpid(), SIGKILL);                  \
    return answer;
#define CALL(type, what, kind, at, path, call) ANSWER(type, -1, what, kind, at, path, call)

// Opening.

#define WRITES(flags) ((flags) & (O_WRONLY | O_RDWR | O_CREAT | O_TRUNC))
#define MODE_OF(flags, m)                                                          \
    mode_t m = 0;                                                                  \
    if ((flags) & (O_CREAT | O_TMPFILE)) { va_list rest; va_start(rest, flags); m = va_arg(rest, mode_t); va_end(rest); }
#define OPEN_NAME(flags) (WRITES(flags) ? "open" : "look")
#define OPEN_KIND(flags) (WRITES(flags) ? 0 : READS)
#define STREAM_NAME(m) (strpbrk(m, "wa+") ? "open" : "look")
#define STREAM_KIND(m) (strpbrk(m, "wa+") ? 0 : READS)

int open(const char *p, int flags, ...) { MODE_OF(flags, m) CALL(int, OPEN_NAME(flags), OPEN_KIND(flags), AT_FDCWD, p, REAL(open)(p, flags, m)) }
int open64(const char *p, int flags, ...) { MODE_OF(flags, m) CALL(int, OPEN_NAME(flags), OPEN_KIND(flags), AT_FDCWD, p, REAL(open64)(p, flags, m)) }
int openat(int at, const char *p, int flags, ...) { MODE_OF(flags, m) CALL(int, OPEN_NAME(flags), OPEN_KIND(flags), at, p, REAL(openat)(at, p, flags, m)) }
int openat64(int at, const char *p, int flags, ...) { MODE_OF(flags, m) CALL(int, OPEN_NAME(flags), OPEN_KIND(flags), at, p, REAL(openat64)(at, p, flags, m)) }
FILE *fopen(const char *p, const char *m) { ANSWER(FILE *, NULL, STREAM_NAME(m), STREAM_KIND(m), AT_FDCWD, p, REAL(fopen)(p, m)) }
FILE *fopen64(const char *p, const char *m) { ANSWER(FILE *, NULL, STREAM_NAME(m), STREAM_KIND(m), AT_FDCWD, p, REAL(fopen64)(p, m)) }
DIR *opendir(const char *p) { ANSWER(DIR *, NULL, "list", READS, AT_FDCWD, p, REAL(opendir)(p)) }
DIR *fdopendir(int f) { ANSWER(DIR *, NULL, "list", READS, f, NULL, REAL(fdopendir)(f)) }

// Closing a file that was written: a network disk says only here that it could not.
int close(int f) {
    int flags = mode == OFF ? -1 : fcntl(f, F_GETFL);
    if (flags == -1 || (flags & O_ACCMODE) == O_RDONLY) return REAL(close)(f);
    Fate fate = fate_of("close", CLOSES, f, NULL);
    int answer = REAL(close)(f);
    if (fate.dies_after) kill(getpid(), SIGKILL);
    if (!fate.fails) return answer;
    errno = fate.fails;
    return -1;
}

// Reading and asking.

ssize_t read(int f, void *b, size_t n) { CALL(ssize_t, "read", READS, f, NULL, REAL(read)(f, b, n)) }
ssize_t readv(int f, const struct iovec *v, int n) { CALL(ssize_t, "read", READS, f, NULL, REAL(readv)(f, v, n)) }
ssize_t pread(int f, void *b, size_t n, off_t o) { CALL(ssize_t, "read", READS, f, NULL, REAL(pread)(f, b, n, o)) }
ssize_t pread64(int f, void *b, size_t n, off64_t o) { CALL(ssize_t, "read", READS, f, NULL, REAL(pread64)(f, b, n, o)) }
void *mmap(void *a, size_t n, int p, int flags, int f, off_t o) {
    if (f < 0) return REAL(mmap)(a, n, p, flags, f, o);
    ANSWER(void *, MAP_FAILED, "mmap", READS, f, NULL, REAL(mmap)(a, n, p, flags, f, o))
}
void *mmap64(void *a, size_t n, int p, int flags, int f, off64_t o) {
    if (f < 0) return REAL(mmap64)(a, n, p, flags, f, o);
    ANSWER(void *, MAP_FAILED, "mmap", READS, f, NULL, REAL(mmap64)(a, n, p, flags, f, o))
}
int stat(const char *p, struct stat *s) { CALL(int, "stat", READS, AT_FDCWD, p, REAL(stat)(p, s)) }
int stat64(const char *p, struct stat64 *s) { CALL(int, "stat", READS, AT_FDCWD, p, REAL(stat64)(p, s)) }
int lstat(const char *p, struct stat *s) { CALL(int, "stat", READS, AT_FDCWD, p, REAL(lstat)(p, s)) }
int lstat64(const char *p, struct stat64 *s) { CALL(int, "stat", READS, AT_FDCWD, p, REAL(lstat64)(p, s)) }
int fstatat(int at, const char *p, struct stat *s, int x) { CALL(int, "stat", READS, at, p, REAL(fstatat)(at, p, s, x)) }
int fstatat64(int at, const char *p, struct stat64 *s, int x) { CALL(int, "stat", READS, at, p, REAL(fstatat64)(at, p, s, x)) }
int statx(int at, const char *p, int x, unsigned m, struct statx *s) { CALL(int, "stat", READS, at, p, REAL(statx)(at, p, x, m, s)) }
int access(const char *p, int m) { CALL(int, "stat", READS, AT_FDCWD, p, REAL(access)(p, m)) }
int statvfs(const char *p, struct statvfs *s) { CALL(int, "room", READS, AT_FDCWD, p, REAL(statvfs)(p, s)) }
int statvfs64(const char *p, struct statvfs64 *s) { CALL(int, "room", READS, AT_FDCWD, p, REAL(statvfs64)(p, s)) }
int flock(int f, int x) { CALL(int, x & LOCK_UN ? "unlock" : "lock", READS, f, NULL, REAL(flock)(f, x)) }

// Writing. A torn write puts half of the bytes down and is the last thing the process does; a short one takes half.

ssize_t write(int f, const void *b, size_t n) {
    Fate fate = fate_of("write", 0, f, NULL);
    if (fate.fails) { errno = fate.fails; return -1; }
    ssize_t answer = REAL(write)(f, b, fate.is_torn || fate.is_short ? (n + 1) / 2 : n);
    if (fate.dies_after || fate.is_torn) kill(getpid(), SIGKILL);
    return answer;
}

ssize_t writev(int f, const struct iovec *v, int n) { CALL(ssize_t, "write", 0, f, NULL, REAL(writev)(f, v, n)) }
ssize_t pwrite(int f, const void *b, size_t n, off_t o) { CALL(ssize_t, "write", 0, f, NULL, REAL(pwrite)(f, b, n, o)) }
ssize_t pwrite64(int f, const void *b, size_t n, off64_t o) { CALL(ssize_t, "write", 0, f, NULL, REAL(pwrite64)(f, b, n, o)) }
ssize_t sendfile(int out, int in, off_t *o, size_t n) { CALL(ssize_t, "write", 0, out, NULL, REAL(sendfile)(out, in, o, n)) }
ssize_t sendfile64(int out, int in, off64_t *o, size_t n) { CALL(ssize_t, "write", 0, out, NULL, REAL(sendfile64)(out, in, o, n)) }
ssize_t copy_file_range(int in, off64_t *oi, int out, off64_t *oo, size_t n, unsigned x) { CALL(ssize_t, "write", 0, out, NULL, REAL(copy_file_range)(in, oi, out, oo, n, x)) }
int fallocate(int f, int m, off_t o, off_t n) { CALL(int, "fallocate", 0, f, NULL, REAL(fallocate)(f, m, o, n)) }
int fallocate64(int f, int m, off64_t o, off64_t n) { CALL(int, "fallocate", 0, f, NULL, REAL(fallocate64)(f, m, o, n)) }
int posix_fallocate(int f, off_t o, off_t n) { // answers with the number itself
    Fate fate = fate_of("fallocate", 0, f, NULL);
    return fate.fails ? fate.fails : REAL(posix_fallocate)(f, o, n);
}
int posix_fallocate64(int f, off64_t o, off64_t n) {
    Fate fate = fate_of("fallocate", 0, f, NULL);
    return fate.fails ? fate.fails : REAL(posix_fallocate64)(f, o, n);
}
int fsync(int f) { CALL(int, "fsync", SYNCS, f, NULL, REAL(fsync)(f)) }
int fdatasync(int f) { CALL(int, "fsync", SYNCS, f, NULL, REAL(fdatasync)(f)) }
int truncate(const char *p, off_t n) { CALL(int, "truncate", FREES, AT_FDCWD, p, REAL(truncate)(p, n)) }
int truncate64(const char *p, off64_t n) { CALL(int, "truncate", FREES, AT_FDCWD, p, REAL(truncate64)(p, n)) }
int ftruncate(int f, off_t n) { CALL(int, "truncate", FREES, f, NULL, REAL(ftruncate)(f, n)) }
int ftruncate64(int f, off64_t n) { CALL(int, "truncate", FREES, f, NULL, REAL(ftruncate64)(f, n)) }

// Names.

int rename(const char *a, const char *b) { CALL(int, "rename", 0, AT_FDCWD, b, REAL(rename)(a, b)) }
int renameat(int x, const char *a, int y, const char *b) { CALL(int, "rename", 0, y, b, REAL(renameat)(x, a, y, b)) }
int renameat2(int x, const char *a, int y, const char *b, unsigned z) { CALL(int, "rename", 0, y, b, REAL(renameat2)(x, a, y, b, z)) }
int unlink(const char *p) { CALL(int, "unlink", FREES, AT_FDCWD, p, REAL(unlink)(p)) }
int unlinkat(int at, const char *p, int x) { CALL(int, "unlink", FREES, at, p, REAL(unlinkat)(at, p, x)) }
int rmdir(const char *p) { CALL(int, "rmdir", FREES, AT_FDCWD, p, REAL(rmdir)(p)) }
int link(const char *a, const char *b) { CALL(int, "link", 0, AT_FDCWD, b, REAL(link)(a, b)) }
int linkat(int x, const char *a, int y, const char *b, int z) { CALL(int, "link", 0, y, b, REAL(linkat)(x, a, y, b, z)) }
int symlink(const char *a, const char *b) { CALL(int, "link", 0, AT_FDCWD, b, REAL(symlink)(a, b)) }
int mkdir(const char *p, mode_t m) { CALL(int, "mkdir", 0, AT_FDCWD, p, REAL(mkdir)(p, m)) }
int mkdirat(int at, const char *p, mode_t m) { CALL(int, "mkdir", 0, at, p, REAL(mkdirat)(at, p, m)) }
int chmod(const char *p, mode_t m) { CALL(int, "chmod", 0, AT_FDCWD, p, REAL(chmod)(p, m)) }
int fchmod(int f, mode_t m) { CALL(int, "chmod", 0, f, NULL, REAL(fchmod)(f, m)) }
int utimensat(int at, const char *p, const struct timespec t[2], int x) { CALL(int, "chmod", 0, at, p, REAL(utimensat)(at, p, t, x)) }
