/* Linux calls that the C library may lack, and the two that pass descriptors; no policy. */
#include "cage.h"
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define AT_EMPTY 0x1000

enum { NR_OPEN_TREE = 428, NR_MOVE_MOUNT, NR_FSOPEN, NR_FSCONFIG, NR_FSMOUNT, NR_FSPICK, NR_CLOSE_RANGE = 436, NR_MOUNT_SETATTR = 442 };
enum { SET_FLAG = 0, SET_STRING = 1, SET_FD = 5 };

int sys_fsopen(const char *kind) { return (int)syscall(NR_FSOPEN, kind, 1u); }
int sys_fsmount(int fs, unsigned attributes) { return (int)syscall(NR_FSMOUNT, fs, 1u, attributes); }
int sys_open_tree(int folder, const char *path, unsigned flags) { return (int)syscall(NR_OPEN_TREE, folder, path, flags | TREE_CLOEXEC); }
int sys_fspick(int fd) { return (int)syscall(NR_FSPICK, fd, "", 1u | 8u); }

int sys_move_mount(int from, const char *from_path, int to, const char *to_path) {
    return (int)syscall(NR_MOVE_MOUNT, from, from_path, to, to_path, *from_path ? 0u : 4u);
}

int sys_set_attributes(int fd, const char *path, unsigned flags, uint64_t set, int userns) {
    struct { uint64_t set, clear, propagation, userns; } a = {set, 0, 0, userns >= 0 ? (uint64_t)userns : 0};
    return (int)syscall(NR_MOUNT_SETATTR, fd, path, flags, &a, sizeof a);
}

int fs_string(int fs, const char *key, const char *value) { return (int)syscall(NR_FSCONFIG, fs, SET_STRING, key, value, 0); }
int fs_flag(int fs, const char *key) { return (int)syscall(NR_FSCONFIG, fs, SET_FLAG, key, NULL, 0); }
int fs_fd(int fs, const char *key, int fd) { return (int)syscall(NR_FSCONFIG, fs, SET_FD, key, NULL, fd); }
int fs_do(int fs, int command) { return (int)syscall(NR_FSCONFIG, fs, command, NULL, NULL, 0); }
int sys_pivot_root(const char *new_root, const char *put_old) { return (int)syscall(SYS_pivot_root, new_root, put_old); }

/* `fds` must be sorted. */
void keep_only(const int *fds, size_t num) {
    unsigned low = 3;
    for (size_t i = 0; i < num; i++) {
        if (fds[i] < (int)low) continue;
        if ((unsigned)fds[i] > low) syscall(NR_CLOSE_RANGE, low, (unsigned)fds[i] - 1, 0);
        low = (unsigned)fds[i] + 1;
    }
    syscall(NR_CLOSE_RANGE, low, ~0u, 0);
}

int write_at(int folder, const char *path, const char *text) {
    int fd = openat(folder, path, O_WRONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    ssize_t n = write(fd, text, strlen(text));
    int number = errno;
    close(fd);
    errno = number;
    return n < 0 ? -1 : 0;
}

static int map_ids(int proc_fd, const char *pid, const struct settings *s) {
    char path[64], text[64];
    uint32_t first = s->num_ids == 1 ? 1000 : 0;
    snprintf(text, sizeof text, "%u %u %u", first, s->id_base, s->num_ids);
    snprintf(path, sizeof path, "%s/setgroups", pid);
    if (s->num_ids == 1) write_at(proc_fd, path, "deny"); /* denied already where the parent's is */
    snprintf(path, sizeof path, "%s/uid_map", pid);
    if (write_at(proc_fd, path, text) < 0) return -1;
    snprintf(path, sizeof path, "%s/gid_map", pid);
    return write_at(proc_fd, path, text);
}

/* A user namespace with the ids of a box, held by a descriptor: its ids are written by us, who have the right, not from inside. */
int make_userns(const struct settings *s, uid_t maker, rlim_t num_processes) {
    int up[2], down[2], fd = -1;
    char pid_text[32] = "", path[64];
    if (pipe2(up, O_CLOEXEC) < 0) return -1;
    if (pipe2(down, O_CLOEXEC) < 0) { close(up[0]); close(up[1]); return -1; }
    pid_t pid = fork();
    if (pid == 0) {
        struct rlimit r = {num_processes, num_processes};
        /* The kernel counts what all of a namespace uses (processes, watches, queued signals) for the user who made it, too: never root. */
        if (maker && (prctl(PR_SET_SECUREBITS, 4 /* SECBIT_NO_SETUID_FIXUP */) < 0 || setrlimit(RLIMIT_NPROC, &r) < 0 ||
                      setresuid(maker, maker, maker) < 0)) _exit(errno);
        if (unshare(CLONE_NEWUSER) < 0) _exit(errno);
        /* Its number as the proc file system we hold counts: that one may belong to an outer pid namespace. */
        ssize_t n = readlinkat(s->proc_fd, "self", pid_text, sizeof pid_text - 1);
        if (n <= 0 || write(up[1], pid_text, (size_t)n) != n) _exit(EIO);
        close(down[1]);
        if (read(down[0], pid_text, 1) < 0) {}
        _exit(0);
    }
    int number = errno;
    close(up[1]);
    close(down[0]);
    if (pid > 0) {
        int status;
        ssize_t n = read(up[0], pid_text, sizeof pid_text - 1);
        if (n > 0) {
            pid_text[n] = 0;
            snprintf(path, sizeof path, "%s/ns/user", pid_text);
            if (map_ids(s->proc_fd, pid_text, s) == 0) fd = openat(s->proc_fd, path, O_RDONLY | O_CLOEXEC);
            number = errno;
        }
        close(down[1]);
        down[1] = -1;
        waitpid(pid, &status, 0);
        if (n <= 0) number = WIFEXITED(status) ? WEXITSTATUS(status) : EIO;
    }
    close(up[0]);
    if (down[1] >= 0) close(down[1]);
    errno = number;
    return fd;
}

int receive(int fd, uint8_t *data, size_t room, size_t *size, int *fds, size_t *num_fds) {
    struct iovec iov = {data, room};
    union { struct cmsghdr align; char room[CMSG_SPACE(MAX_FDS * sizeof(int))]; } control;
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.room, .msg_controllen = sizeof control.room};
    ssize_t n;
    do n = recvmsg(fd, &m, MSG_CMSG_CLOEXEC); while (n < 0 && errno == EINTR);
    *num_fds = 0;
    if (n <= 0) return (int)n;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c))
        if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
            *num_fds = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
            memcpy(fds, CMSG_DATA(c), *num_fds * sizeof(int));
        }
    *size = (size_t)n;
    return 1;
}

int send_with(int fd, const void *data, size_t size, const int *fds, size_t num_fds) {
    struct iovec iov = {(void *)data, size};
    union { struct cmsghdr align; char room[CMSG_SPACE(MAX_FDS * sizeof(int))]; } control;
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1};
    if (num_fds) {
        m.msg_control = control.room;
        m.msg_controllen = CMSG_SPACE(num_fds * sizeof(int));
        struct cmsghdr *c = CMSG_FIRSTHDR(&m);
        c->cmsg_level = SOL_SOCKET; c->cmsg_type = SCM_RIGHTS; c->cmsg_len = CMSG_LEN(num_fds * sizeof(int));
        memcpy(CMSG_DATA(c), fds, num_fds * sizeof(int));
    }
    ssize_t n;
    do n = sendmsg(fd, &m, MSG_NOSIGNAL); while (n < 0 && errno == EINTR);
    return n < 0 ? -1 : 0;
}

/* Below `root` and on its file system alone, whatever links say: for files of the box that are opened with rights it does not have. */
int open_below(int root, const char *path, int flags, mode_t mode) {
    struct { uint64_t flags, mode, resolve; } how = {(uint64_t)(flags | O_CLOEXEC), flags & O_CREAT ? mode : 0, 1 | 2 | 16 /* NO_XDEV, NO_MAGICLINKS, IN_ROOT */};
    return (int)syscall(437 /* openat2 */, root, path, &how, sizeof how);
}
