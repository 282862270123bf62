/* LD_PRELOAD library that makes chosen file system calls of a process fail, or sends the process a signal there.
 *
 * RFT_SYSCALL_FAULTS holds the rules, separated by ';'. A rule is a list of key=value, separated by ',':
 *   call=NAME      rename, fsync, fdatasync, open, read, pread, write, pwrite, unlink, mkdir, ftruncate, flock, fcntl
 *   error=NUMBER   errno that the call fails with; or
 *   signal=NUMBER  signal that the process sends itself; after=1 sends it after the call, else before it
 *   path=TEXT      only calls on files whose path contains TEXT (either path of a rename)
 *   process=TEXT   only processes whose command line contains TEXT
 *   nth=N          the first call to strike is the N-th matching call of the process (1)
 *   times=N        number of calls to strike (1); 0: all following calls
 *   once=FILE      strike only if FILE can be created: one strike over all processes that share the rule
 * A value @FILE names a file that holds the rules; each process reads it once, at its start.
 * RFT_SYSCALL_FAULTS_LOG names a file; each strike appends "pid call path" to it.
 * See syscall_faults.py for the Python side.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define RULES 16
#define TEXT 512

struct rule {
    char call[16], path[TEXT], process[TEXT], once[TEXT];
    int error, signal, after;
    long nth, times, seen;
};

static struct rule rules[RULES];
static int rule_count;
static char log_file[TEXT];
static pthread_mutex_t counting = PTHREAD_MUTEX_INITIALIZER;

static void copy(char *target, size_t size, const char *value) { snprintf(target, size, "%s", value); }

static int command_line_contains(const char *text) {
    char line[8192];
    int handle = (int)syscall(SYS_openat, AT_FDCWD, "/proc/self/cmdline", O_RDONLY);
    long length = handle < 0 ? 0 : syscall(SYS_read, handle, line, sizeof line - 1);
    if (handle >= 0) syscall(SYS_close, handle);
    for (long at = 0; at < length - 1; at++)
        if (!line[at]) line[at] = ' ';
    line[length > 0 ? length : 0] = 0;
    return strstr(line, text) != NULL;
}

static void parse_rule(char *text) {
    struct rule rule = {.nth = 1, .times = 1};
    char *rest = NULL;
    for (char *part = strtok_r(text, ",", &rest); part; part = strtok_r(NULL, ",", &rest)) {
        char *value = strchr(part, '=');
        if (!value) continue;
        *value++ = 0;
        if (!strcmp(part, "call")) copy(rule.call, sizeof rule.call, value);
        else if (!strcmp(part, "path")) copy(rule.path, TEXT, value);
        else if (!strcmp(part, "process")) copy(rule.process, TEXT, value);
        else if (!strcmp(part, "once")) copy(rule.once, TEXT, value);
        else if (!strcmp(part, "error")) rule.error = atoi(value);
        else if (!strcmp(part, "signal")) rule.signal = atoi(value);
        else if (!strcmp(part, "after")) rule.after = atoi(value);
        else if (!strcmp(part, "nth")) rule.nth = atol(value);
        else if (!strcmp(part, "times")) rule.times = atol(value);
    }
    if (rule_count < RULES && rule.call[0] && (!rule.process[0] || command_line_contains(rule.process)))
        rules[rule_count++] = rule;
}

static const char *content_of(const char *path) {
    static char text[RULES * TEXT];
    int handle = (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY);
    long length = handle < 0 ? 0 : syscall(SYS_read, handle, text, sizeof text - 1);
    if (handle >= 0) syscall(SYS_close, handle);
    text[length > 0 ? length : 0] = 0;
    return text;
}

__attribute__((constructor)) static void read_rules(void) {
    const char *given = getenv("RFT_SYSCALL_FAULTS"), *log = getenv("RFT_SYSCALL_FAULTS_LOG");
    if (log) copy(log_file, sizeof log_file, log);
    if (!given) return;
    if (given[0] == '@') given = content_of(given + 1);
    char *text = strdup(given), *rest = NULL;
    for (char *part = strtok_r(text, ";", &rest); part; part = strtok_r(NULL, ";", &rest)) parse_rule(part);
    free(text);
}

/* Uses raw system calls, so that the library's own calls are never struck. */
static int create_anew(const char *path) {
    int handle = (int)syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_EXCL, 0600);
    if (handle >= 0) syscall(SYS_close, handle);
    return handle >= 0;
}

static void write_log(const char *call, const char *path) {
    char line[2 * TEXT];
    int length = snprintf(line, sizeof line, "%d %s %s\n", (int)getpid(), call, path);
    int handle = log_file[0] ? (int)syscall(SYS_openat, AT_FDCWD, log_file, O_WRONLY | O_CREAT | O_APPEND, 0600) : -1;
    if (handle < 0) return;
    syscall(SYS_write, handle, line, length < (int)sizeof line ? length : (int)sizeof line - 1);
    syscall(SYS_close, handle);
}

/* The rule that strikes this call, or NULL. */
static struct rule *rule_for(const char *call, const char *path, const char *other) {
    struct rule *found = NULL;
    int was = errno;
    for (int index = 0; index < rule_count && !found; index++) {
        struct rule *rule = &rules[index];
        if (strcmp(rule->call, call)) continue;
        if (rule->path[0] && !strstr(path, rule->path) && !(other && strstr(other, rule->path))) continue;
        pthread_mutex_lock(&counting);
        long number = ++rule->seen;
        pthread_mutex_unlock(&counting);
        if (number < rule->nth || (rule->times && number >= rule->nth + rule->times)) continue;
        if (rule->once[0] && !create_anew(rule->once)) continue;
        found = rule;
    }
    if (found) write_log(call, path);
    errno = was;
    return found;
}

static const char *path_of(int handle, char *buffer) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", handle);
    long length = syscall(SYS_readlinkat, AT_FDCWD, link, buffer, TEXT - 1);
    buffer[length > 0 ? length : 0] = 0;
    return buffer;
}

static struct rule *rule_for_handle(const char *call, int handle) {
    char buffer[TEXT];
    return rule_count ? rule_for(call, path_of(handle, buffer), NULL) : NULL;
}

#define REAL(name, type) ((type)dlsym(RTLD_NEXT, #name))

/* Fail, or signal and call, or call and signal. `invocation` is the real call. */
#define STRIKE(match, invocation)                                         \
    do {                                                                  \
        struct rule *struck = (match);                                   \
        if (struck && struck->error) { errno = struck->error; return -1; }\
        if (struck && struck->signal && !struck->after) raise(struck->signal); \
        __typeof__(invocation) result = (invocation);                     \
        if (struck && struck->signal && struck->after) raise(struck->signal);  \
        return result;                                                    \
    } while (0)

int rename(const char *from, const char *to) {
    STRIKE(rule_for("rename", to, from), REAL(rename, int (*)(const char *, const char *))(from, to));
}
int renameat(int from_at, const char *from, int to_at, const char *to) {
    STRIKE(rule_for("rename", to, from),
           REAL(renameat, int (*)(int, const char *, int, const char *))(from_at, from, to_at, to));
}
int fsync(int handle) { STRIKE(rule_for_handle("fsync", handle), REAL(fsync, int (*)(int))(handle)); }
int fdatasync(int handle) { STRIKE(rule_for_handle("fdatasync", handle), REAL(fdatasync, int (*)(int))(handle)); }
int flock(int handle, int operation) {
    STRIKE(rule_for_handle("flock", handle), REAL(flock, int (*)(int, int))(handle, operation));
}
int unlink(const char *path) { STRIKE(rule_for("unlink", path, NULL), REAL(unlink, int (*)(const char *))(path)); }
int unlinkat(int at, const char *path, int flags) {
    STRIKE(rule_for("unlink", path, NULL), REAL(unlinkat, int (*)(int, const char *, int))(at, path, flags));
}
int mkdir(const char *path, mode_t mode) {
    STRIKE(rule_for("mkdir", path, NULL), REAL(mkdir, int (*)(const char *, mode_t))(path, mode));
}
int mkdirat(int at, const char *path, mode_t mode) {
    STRIKE(rule_for("mkdir", path, NULL), REAL(mkdirat, int (*)(int, const char *, mode_t))(at, path, mode));
}
ssize_t read(int handle, void *data, size_t size) {
    STRIKE(rule_for_handle("read", handle), REAL(read, ssize_t (*)(int, void *, size_t))(handle, data, size));
}
ssize_t write(int handle, const void *data, size_t size) {
    STRIKE(rule_for_handle("write", handle), REAL(write, ssize_t (*)(int, const void *, size_t))(handle, data, size));
}
ssize_t writev(int handle, const struct iovec *parts, int count) {
    STRIKE(rule_for_handle("write", handle),
           REAL(writev, ssize_t (*)(int, const struct iovec *, int))(handle, parts, count));
}

/* glibc has each of these under two names: with and without 64. */
#define BOTH_NAMES(name, alias, call, result, parameters, arguments)                                      \
    result name parameters { STRIKE(rule_for_handle(call, handle), REAL(name, result(*) parameters) arguments); } \
    result alias parameters { STRIKE(rule_for_handle(call, handle), REAL(alias, result(*) parameters) arguments); }

BOTH_NAMES(pread, pread64, "pread", ssize_t, (int handle, void *data, size_t size, off_t at), (handle, data, size, at))
BOTH_NAMES(pwrite, pwrite64, "pwrite", ssize_t, (int handle, const void *data, size_t size, off_t at),
           (handle, data, size, at))
BOTH_NAMES(ftruncate, ftruncate64, "ftruncate", int, (int handle, off_t size), (handle, size))

#define WITH_ARGUMENT(last, kind)  \
    va_list more;                  \
    va_start(more, last);          \
    kind argument = va_arg(more, kind); \
    va_end(more)

#define OPEN(name)                                                                                              \
    int name(const char *path, int flags, ...) {                                                                \
        WITH_ARGUMENT(flags, int);                                                                              \
        STRIKE(rule_for("open", path, NULL), REAL(name, int (*)(const char *, int, ...))(path, flags, argument)); \
    }
#define OPENAT(name)                                                                                            \
    int name(int at, const char *path, int flags, ...) {                                                        \
        WITH_ARGUMENT(flags, int);                                                                              \
        STRIKE(rule_for("open", path, NULL),                                                                    \
               REAL(name, int (*)(int, const char *, int, ...))(at, path, flags, argument));                    \
    }
#define FCNTL(name)                                                                                             \
    int name(int handle, int command, ...) {                                                                    \
        WITH_ARGUMENT(command, void *);                                                                         \
        int locks = command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK || command == F_OFD_SETLKW; \
        STRIKE(locks ? rule_for_handle("fcntl", handle) : NULL,                                                 \
               REAL(name, int (*)(int, int, ...))(handle, command, argument));                                  \
    }
OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
FCNTL(fcntl)
FCNTL(fcntl64)
