/* The zygote: one small process per owner that keeps boxes prepared, kills and reaps them, and tells the owner of each that ended.
 *
 * It is not on the way of an order: prepared boxes take orders themselves from a socket they share. When the owner dies or hangs up
 * it kills every box, removes its control groups and ends; when it dies itself, the kernel kills its boxes.
 */
#include "cage.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define NUM_BUCKETS 16384u
#define QUIET_S 0.005 /* no order for so long: time to prepare more than the few that must always be there */
#define MAX_LATE 4096
#define MAX_SPARE 256u
#define CLEAN_BYTES (1ll << 20) /* the kernel counts in batches: a group that is empty may show some hundred KiB */

enum state { FREE, PREPARING, IDLE, TAKEN };
enum { TOLD_READY = 1, TOLD_BROKEN, TOLD_GONE };
enum { ORDER_KILL = 1, ORDER_POOL };

/* `id`: the slot's number in the low 20 bits, a count of its uses above, so that news of an old box is never taken for a new one's.
   `next`: in the bucket, or of the free ones; +1, 0 ends. */
struct slot { enum state state; pid_t pid; uint32_t id, group, next; int is_killed, num_oom; }; /* num_oom: of its group, before it */
#define NUMBER(id) ((id) & 0xfffffu)

static struct settings s;
static struct slot *slots;
static uint32_t num_slots, free_slots, buckets[NUM_BUCKETS], next_serial, next_group;
static uint32_t num_preparing, num_idle, num_failed;
static double last_taken, not_before;
static int has_prepared; /* ever: then a failure is a shortage that may pass, not a machine that cannot */
static int control_fd, owner_fd, child_fd, news_fd;
static pid_t opener;
static uint32_t late[MAX_LATE];
static size_t num_late;
static uint32_t spare[MAX_SPARE], first_spare, num_spare; /* groups of boxes that ended, the oldest first */
static struct buffer gone;

static void __attribute__((noreturn)) broken(int number, const char *step) {
    struct buffer m = {0};
    put_u32(&m, TOLD_BROKEN);
    put_u32(&m, (uint32_t)number);
    put_text(&m, step, strlen(step));
    send_with(control_fd, m.data, m.size, NULL, 0);
    _exit(1);
}

static uint32_t new_slot(void) {
    if (!free_slots) {
        uint32_t grown = num_slots ? num_slots * 2 : 256;
        if (!(slots = realloc(slots, grown * sizeof *slots))) _exit(70);
        for (uint32_t i = grown; i-- > num_slots;) { slots[i] = (struct slot){.next = free_slots}; free_slots = i + 1; }
        num_slots = grown;
    }
    uint32_t i = free_slots - 1;
    free_slots = slots[i].next;
    return i;
}

static void remove_group(uint32_t group) {
    char name[32];
    snprintf(name, sizeof name, "b%u", group);
    if (s.cpu_fd >= 0) unlinkat(s.cpu_fd, name, AT_REMOVEDIR);
    if (s.memory_fd < 0 || unlinkat(s.memory_fd, name, AT_REMOVEDIR) == 0 || errno == ENOENT || num_late == MAX_LATE) return;
    late[num_late++] = group; /* the kernel still holds it: tried again with the next */
}

static void remove_late(void) {
    size_t n = num_late;
    num_late = 0;
    for (size_t i = 0; i < n; i++) remove_group(late[i]);
}

static ssize_t read_group(uint32_t group, const char *file, char *text, size_t room) {
    char path[64];
    snprintf(path, sizeof path, "b%u/%s", group, file);
    int fd = s.memory_fd < 0 ? -1 : openat(s.memory_fd, path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    ssize_t n = read(fd, text, room - 1);
    close(fd);
    text[n > 0 ? n : 0] = 0;
    return n;
}

/* How many processes of the group the kernel killed because its memory was used up. */
static int num_oom(uint32_t group) {
    char text[1024], *found;
    if (read_group(group, s.groups == 2 ? "memory.events" : "memory.oom_control", text, sizeof text) <= 0) return 0;
    found = strstr(text, "oom_kill ");
    return found ? atoi(found + 9) : 0;
}

/* Making and removing a group costs as much as the rest of a box's namespaces: those of ended boxes are used again, unless something,
   such as a frozen layer, is still counted in them. */
static int is_clean(uint32_t group) {
    char text[64];
    if (read_group(group, "cgroup.procs", text, sizeof text) != 0) return 0;
    return read_group(group, s.groups == 2 ? "memory.current" : "memory.usage_in_bytes", text, sizeof text) > 0 && atoll(text) <= CLEAN_BYTES;
}

static uint32_t take_group(void) {
    while (num_spare) {
        uint32_t group = spare[first_spare];
        first_spare = (first_spare + 1) % MAX_SPARE;
        num_spare--;
        if (is_clean(group)) return group;
        remove_group(group);
    }
    return next_group++;
}

static void leave_group(uint32_t group) {
    if (s.memory_fd < 0) return;
    if (num_spare == MAX_SPARE) { remove_group(group); return; }
    spare[(first_spare + num_spare++) % MAX_SPARE] = group;
}

/* With control groups of version 2 a box is born in its own: moving there later would hold up every fork and exit of the machine. */
static long fork_into(uint32_t group) {
    uint64_t flags = CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | CLONE_NEWUTS;
    if (s.groups != 2 || s.memory_fd < 0) return syscall(SYS_clone, flags | SIGCHLD, 0, 0, 0, 0);
    char name[32];
    snprintf(name, sizeof name, "b%u", group);
    if (mkdirat(s.memory_fd, name, 0755) < 0 && errno != EEXIST) return -1;
    int fd = openat(s.memory_fd, name, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0) return -1;
    struct { uint64_t flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls, set_tid, num_set_tid, cgroup; } how = {
        .flags = flags | 0x200000000ull /* CLONE_INTO_CGROUP */, .exit_signal = SIGCHLD, .cgroup = (uint64_t)fd};
    long pid = syscall(435 /* clone3 */, &how, sizeof how);
    int number = errno;
    close(fd);
    errno = number;
    return pid;
}

static void prepare_one(void) {
    uint32_t i = new_slot(), serial = next_serial++, id = serial << 20 | i, group = s.memory_fd < 0 ? 0 : take_group();
    long pid = fork_into(group);
    if (pid == 0) live(&s, id, serial, group);
    if (pid < 0) {
        leave_group(group);
        slots[i].next = free_slots;
        free_slots = i + 1;
        not_before = now_s() + 0.1;
        if (++num_failed > 20 && !num_idle) broken(errno, "fork a box with its pid, mount, ipc and uts namespaces");
        return;
    }
    uint32_t *bucket = &buckets[(uint32_t)pid % NUM_BUCKETS];
    slots[i] = (struct slot){PREPARING, (pid_t)pid, id, group, *bucket, 0, num_oom(group)};
    *bucket = i + 1;
    num_preparing++;
}

static int wants_more(double now) {
    uint32_t have = num_idle + num_preparing;
    if (now < not_before || num_preparing >= s.num_preparing) return 0;
    return have < s.pool_low || (have < s.pool_high && now - last_taken >= QUIET_S);
}

static void hear_boxes(void) {
    uint8_t m[256];
    int fds[MAX_FDS];
    size_t size, num_fds;
    for (int most = 256; most--;) {
        struct pollfd p = {.fd = news_fd, .events = POLLIN};
        if (poll(&p, 1, 0) <= 0 || receive(news_fd, m, sizeof m - 1, &size, fds, &num_fds) <= 0) return;
        struct cursor c = {m, m + size, 0};
        uint32_t id = get_u32(&c), i = NUMBER(id), what = get_u32(&c);
        int number = (int)get_u32(&c);
        m[size] = 0;
        if (c.bad || i >= num_slots || slots[i].id != id) continue;
        if (what == NEWS_PREPARED && slots[i].state == PREPARING) { slots[i].state = IDLE; num_preparing--; num_idle++; num_failed = 0; has_prepared = 1; }
        if (what == NEWS_TAKEN && slots[i].state == IDLE) { slots[i].state = TAKEN; num_idle--; last_taken = now_s(); }
        if (what == NEWS_FAILED) {
            not_before = now_s() + 0.1;
            if (!has_prepared || (++num_failed > 20 && !num_idle)) broken(number, (char *)m + 12);
        }
    }
}

static void forget(uint32_t i, int status) {
    if (slots[i].state != TAKEN) hear_boxes(); /* what a box said before it died must be believed first */
    if (slots[i].state == PREPARING) num_preparing--;
    if (slots[i].state == IDLE) num_idle--;
    if (slots[i].state == TAKEN) {
        put_u32(&gone, slots[i].id);
        put_u32(&gone, (uint32_t)status);
        int is_shot = WIFSIGNALED(status) ? WTERMSIG(status) == SIGKILL : WEXITSTATUS(status) == 128 + SIGKILL;
        put_u32(&gone, (uint32_t)(!slots[i].is_killed && is_shot && num_oom(slots[i].group) > slots[i].num_oom));
    }
    uint32_t *link = &buckets[(uint32_t)slots[i].pid % NUM_BUCKETS];
    while (*link != i + 1) link = &slots[*link - 1].next;
    *link = slots[i].next;
    leave_group(slots[i].group);
    slots[i] = (struct slot){.state = FREE, .next = free_slots};
    free_slots = i + 1;
}

static void reap(void) {
    int status;
    pid_t pid;
    while ((pid = waitpid(-1, &status, WNOHANG)) > 0) {
        uint32_t i = buckets[(uint32_t)pid % NUM_BUCKETS];
        while (i && slots[i - 1].pid != pid) i = slots[i - 1].next;
        if (i) forget(i - 1, status);
    }
    if (!gone.size) return;
    struct buffer m = {0};
    for (size_t at = 0; at < gone.size; at += 12 * 1024) {
        size_t n = gone.size - at < 12 * 1024 ? gone.size - at : 12 * 1024;
        m.size = 0;
        put_u32(&m, TOLD_GONE);
        put(&m, gone.data + at, n);
        send_with(control_fd, m.data, m.size, NULL, 0);
    }
    drop(&m);
    gone.size = 0;
}

/* 0: the owner hung up. */
static int obey(void) {
    uint8_t m[65536];
    int fds[MAX_FDS];
    size_t size, num_fds;
    if (receive(control_fd, m, sizeof m, &size, fds, &num_fds) <= 0) return 0;
    struct cursor c = {m, m + size, 0};
    uint32_t what = get_u32(&c);
    if (what == ORDER_POOL) s.pool_high = get_u32(&c);
    while (what == ORDER_KILL && c.at < c.end) {
        uint32_t id = get_u32(&c), i = NUMBER(id);
        if (!c.bad && i < num_slots && slots[i].state != TAKEN) hear_boxes();
        if (c.bad || i >= num_slots || slots[i].id != id || slots[i].state != TAKEN) continue;
        slots[i].is_killed = 1;
        kill(slots[i].pid, SIGKILL);
    }
    return 1;
}

static void __attribute__((noreturn)) end_all(int memory_parent, int cpu_parent, const char *own) {
    kill(opener, SIGKILL);
    waitpid(opener, NULL, 0);
    for (uint32_t i = 0; i < num_slots; i++) if (slots[i].state != FREE) kill(slots[i].pid, SIGKILL);
    for (uint32_t i = 0; i < num_slots; i++) if (slots[i].state != FREE) { waitpid(slots[i].pid, NULL, 0); remove_group(slots[i].group); }
    while (num_spare) remove_group(spare[(first_spare + --num_spare) % MAX_SPARE]);
    for (int tries = 0; num_late && tries < 200; tries++) { usleep(10000); remove_late(); }
    if (memory_parent >= 0) unlinkat(memory_parent, own, AT_REMOVEDIR); /* what the kernel still holds is swept by the next owner */
    if (cpu_parent >= 0) unlinkat(cpu_parent, own, AT_REMOVEDIR);
    _exit(0);
}

/* Without rights on the host: the first process of an own user and pid namespace, where the boxes can be made. */
static void become_own_root(void) {
    char text[64];
    uid_t user = geteuid();
    gid_t group = getegid();
    if (unshare(CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID) < 0) broken(errno, "unshare user, mount and pid namespaces");
    write_at(s.proc_fd, "self/setgroups", "deny");
    snprintf(text, sizeof text, "1000 %u 1", user);
    if (write_at(s.proc_fd, "self/uid_map", text) < 0) broken(errno, "map the user");
    snprintf(text, sizeof text, "1000 %u 1", group);
    if (write_at(s.proc_fd, "self/gid_map", text) < 0) broken(errno, "map the group");
    pid_t pid = fork();
    if (pid < 0) broken(errno, "fork into the pid namespace");
    if (pid > 0) {
        int status;
        keep_only(NULL, 0);
        waitpid(pid, &status, 0);
        _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 1);
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL);
}

static int open_folder(const char *path) { return path && *path ? open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1; }

int zygote_main(int argc, char **argv) {
    uint8_t greeting[16];
    int fds[MAX_FDS];
    size_t size, num_fds;
    const char *step = "read the plan";
    if (argc < 3) return 2;
    control_fd = atoi(argv[2]);
    for (int i = 1; i < argc; i++) memset(argv[i], 0, strlen(argv[i]));
    prctl(PR_SET_NAME, "init");
    fcntl(control_fd, F_SETFD, FD_CLOEXEC);
    signal(SIGTERM, SIG_IGN);
    signal(SIGINT, SIG_IGN);
    signal(SIGPIPE, SIG_IGN);
    umask(022);
    if (receive(control_fd, greeting, sizeof greeting, &size, fds, &num_fds) <= 0 || num_fds != 4) return 1;
    s.orders_fd = fds[0];
    owner_fd = fds[2];
    struct stat st;
    uint8_t *plan = fstat(fds[3], &st) < 0 ? NULL : malloc((size_t)st.st_size);
    if (!plan || pread(fds[3], plan, (size_t)st.st_size, 0) != st.st_size) broken(errno, step);
    close(fds[3]);
    struct cursor c = {plan, plan + st.st_size, 0};
    s.is_rootless = (int)get_u32(&c); s.groups = (int)get_u32(&c);
    s.pool_low = get_u32(&c); s.pool_high = get_u32(&c); s.num_preparing = get_u32(&c);
    s.id_base = get_u32(&c); s.num_ids = get_u32(&c);
    s.by_path = (int)get_u32(&c); s.user_xattr = (int)get_u32(&c);
    s.filter = get_text(&c, &s.num_filter);
    const char *own = get_string(&c);
    char *memory = get_string(&c), *cpu = get_string(&c), *stage = get_string(&c), path[4096];
    if (c.bad || !own || !memory || !cpu || !stage) broken(EINVAL, step);
    snprintf(s.stage, sizeof s.stage, "%s", stage);
    int memory_parent = open_folder(memory), cpu_parent = open_folder(cpu);
    snprintf(path, sizeof path, "%s/%s", memory, own);
    s.memory_fd = memory_parent < 0 ? -1 : open_folder(path);
    snprintf(path, sizeof path, "%s/%s", cpu, own);
    s.cpu_fd = cpu_parent < 0 ? -1 : open_folder(path);
    s.proc_fd = open("/proc", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (s.is_rootless) become_own_root();
    else if (unshare(CLONE_NEWNS) < 0) broken(errno, "unshare the mount namespace");
    int pair[2];
    char byte;
    if (pipe2(pair, O_CLOEXEC) < 0) broken(errno, "make a pipe");
    opener = fork();
    if (opener < 0) broken(errno, "fork");
    if (opener == 0) open_layers(&s, fds[1], pair[1]);
    close(pair[1]);
    /* It must be in a mount namespace of its own first: changing the root takes along every process of this one. */
    if (read(pair[0], &byte, 1) != 1) broken(EIO, "start the process that opens layers");
    close(pair[0]);
    close(fds[1]);
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0) broken(errno, "make a socket pair");
    news_fd = pair[0];
    s.news_fd = pair[1];
    if (enter_template(&s, &c, &step) < 0) broken(errno, step);
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);
    for (int i = 0; i < 3; i++) dup2(null, i); /* a box must hold nothing of its owner's terminal */
    close(null);
    sigset_t children;
    sigemptyset(&children);
    sigaddset(&children, SIGCHLD);
    sigprocmask(SIG_BLOCK, &children, NULL);
    child_fd = signalfd(-1, &children, SFD_NONBLOCK | SFD_CLOEXEC);
    uint32_t ready[2] = {TOLD_READY, (uint32_t)s.has_idmap};
    send_with(control_fd, ready, sizeof ready, NULL, 0);
    for (;;) {
        double now = now_s();
        for (int most = 4; most-- && wants_more(now);) prepare_one();
        int is_short = num_idle + num_preparing < s.pool_high && num_preparing < s.num_preparing;
        struct pollfd p[] = {{control_fd, POLLIN, 0}, {owner_fd, POLLIN, 0}, {child_fd, POLLIN, 0}, {news_fd, POLLIN, 0}};
        int ms = wants_more(now) ? 0 : is_short ? (now < not_before ? 100 : 5) : num_late ? 50 : -1;
        poll(p, 4, ms);
        if (p[1].revents || (p[0].revents && !obey())) end_all(memory_parent, cpu_parent, own);
        if (p[3].revents) hear_boxes();
        if (p[2].revents) {
            struct signalfd_siginfo info;
            while (read(child_fd, &info, sizeof info) > 0) {}
            reap();
        }
        if (num_late) remove_late();
    }
}
