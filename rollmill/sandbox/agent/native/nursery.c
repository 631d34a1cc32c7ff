/* The nursery: the parent of every program of a box that can be forked live, so that all of them are one tree that CRIU can dump.
 *
 * It starts programs for the agent and tells of their end; what they leave behind becomes its child, not the agent's. Before a dump it
 * takes the agent's ends of their pipes into keeping and listens for an agent, the old one or one of a fork, that asks for them.
 * The first half of this file runs in the nursery, the second in the agent.
 */
#include "cage.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAX_HELD 1024
#define WAIT_MS 2000 /* it answers at once, unless a program of the box stopped it */

enum { SPAWN = 1, HOLD, LISTEN, ENDED, KEPT };

/* Every message; what is not of its kind is 0. `which`: bit i says that the i-th of input, output and error is among the descriptors. */
struct note { uint32_t kind, flags, which; int32_t pid, number; struct rusage used; char name[16]; uint32_t num_name; };

static struct { int32_t pid; uint32_t flags, which; int fds[3]; } held[MAX_HELD];
static size_t num_held;
static struct note *untold;
static size_t num_untold;
static int agent_fd = -1, listen_fd = -1;

static char **words_of(char *at, char *end, uint32_t num) {
    char **words = calloc(num + 1, sizeof *words);
    for (uint32_t i = 0; words && i < num && at < end; i++, at += strlen(at) + 1) words[i] = at;
    return words;
}

/* The file: how many words and variables, then the folder, the words and the variables, each with its NUL. */
static void spawn_child(uint32_t tty, const int *fds) {
    struct note reply = {.kind = SPAWN, .pid = -1, .number = EINVAL};
    struct stat st;
    uint32_t num[2] = {0, 0};
    char *text = fstat(fds[0], &st) < 0 || st.st_size < 9 ? NULL : malloc((size_t)st.st_size + 1);
    if (text && pread(fds[0], text, (size_t)st.st_size, 0) == st.st_size) {
        char *end = text + st.st_size, *cwd = text + 8, *at = cwd + strlen(cwd) + 1;
        *end = 0;
        memcpy(num, text, 8);
        char **argv = words_of(at, end, num[0]);
        for (uint32_t i = 0; i < num[0]; i++) at += strlen(at) + 1;
        char **env = words_of(at, end, num[1]);
        reply.number = argv && env ? 0 : ENOMEM;
        if (argv && env) reply.pid = spawn(argv, env, cwd, fds + 1, (int)tty, &reply.number);
        free(argv); free(env);
    }
    free(text);
    for (int i = 0; i < 4; i++) close(fds[i]);
    send_with(agent_fd, &reply, sizeof reply, NULL, 0);
}

static void hold(const struct note *n, const int *fds) {
    if (num_held == MAX_HELD) return;
    held[num_held].pid = n->pid; held[num_held].flags = n->flags; held[num_held].which = n->which;
    for (int i = 0, at = 0; i < 3; i++) held[num_held].fds[i] = n->which >> i & 1 ? fds[at++] : -1;
    num_held++;
}

/* Under a name that the kernel picks: nobody can have taken it before. */
static void listen_for_agent(void) {
    struct note reply = {.kind = LISTEN, .pid = getpid()};
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    socklen_t size = sizeof at;
    listen_fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (listen_fd < 0 || bind(listen_fd, (struct sockaddr *)&at, sizeof at.sun_family) < 0 || listen(listen_fd, 4) < 0 ||
        getsockname(listen_fd, (struct sockaddr *)&at, &size) < 0) reply.number = errno;
    reply.num_name = (uint32_t)(size - sizeof at.sun_family);
    if (reply.num_name <= sizeof reply.name) memcpy(reply.name, at.sun_path, reply.num_name);
    send_with(agent_fd, &reply, sizeof reply, NULL, 0);
    close(agent_fd);
    agent_fd = -1;
}

static void take_agent(void) {
    struct ucred peer;
    socklen_t size = sizeof peer;
    int fd = accept4(listen_fd, NULL, NULL, SOCK_CLOEXEC);
    if (fd < 0) return;
    if (getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &peer, &size) < 0 || peer.pid != 1) { close(fd); return; } /* a program of the box */
    agent_fd = fd;
    close(listen_fd);
    listen_fd = -1;
    for (size_t i = 0; i < num_held; i++) {
        struct note n = {.kind = HOLD, .pid = held[i].pid, .flags = held[i].flags, .which = held[i].which};
        int fds[3], num = 0;
        for (int k = 0; k < 3; k++) if (held[i].fds[k] >= 0) fds[num++] = held[i].fds[k];
        send_with(agent_fd, &n, sizeof n, fds, (size_t)num);
        for (int k = 0; k < num; k++) close(fds[k]);
    }
    num_held = 0;
    struct note last = {.kind = KEPT, .pid = getpid()};
    send_with(agent_fd, &last, sizeof last, NULL, 0);
}

/* An end between two agents is kept for the second; it is not left to be waited for, because CRIU stumbles over the dead. */
static void tell_ends(void) {
    struct note n = {.kind = ENDED};
    while ((n.pid = wait4(-1, &n.number, WNOHANG, &n.used)) > 0) {
        if (agent_fd >= 0) send_with(agent_fd, &n, sizeof n, NULL, 0);
        else if (num_untold < MAX_HELD) untold[num_untold++] = n;
    }
    for (size_t i = 0; agent_fd >= 0 && i < num_untold; i++) send_with(agent_fd, &untold[i], sizeof n, NULL, 0);
    if (agent_fd >= 0) num_untold = 0;
}

/* `nursery PROCESSES WORKDIR`, the agent at descriptor 3. */
int nursery_main(int argc, char **argv) {
    if (argc < 4) return 2;
    struct box box = {.workdir = strdup(argv[3]), .num_processes = atoi(argv[2]), .upper_fd = -1, .layer_fd = -1, .is_contained = 1};
    int null = open("/dev/null", O_RDWR | O_CLOEXEC), keep[] = {3}; /* one of the box: what the agent holds lies outside */
    if (!box.workdir || null < 0 || !(untold = calloc(MAX_HELD, sizeof *untold))) return 1;
    for (int i = 0; i < 3; i++) dup2(null, i);
    keep_only(keep, 1);
    agent_fd = 3;
    fcntl(3, F_SETFD, FD_CLOEXEC);
    for (int i = 1; i < argc; i++) memset(argv[i], 0, strlen(argv[i]));
    if (setresuid(geteuid(), geteuid(), geteuid()) < 0) return 1; /* the agent's real user is none of the box's, and cannot be restored */
    if (chdir("/") < 0 || prctl(PR_SET_CHILD_SUBREAPER, 1) < 0 || prctl(PR_SET_DUMPABLE, 0) < 0) return 1;
    prctl(PR_SET_NAME, "init");
    commands_begin(&box);
    sigset_t children;
    sigemptyset(&children);
    sigaddset(&children, SIGCHLD);
    sigprocmask(SIG_SETMASK, &children, NULL);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGTERM, SIG_DFL); /* the zygote ignored it; a snapshot that ends all programs ends us too */
    int child_fd = signalfd(-1, &children, SFD_NONBLOCK | SFD_CLOEXEC);
    for (;;) {
        struct pollfd p[] = {{agent_fd >= 0 ? agent_fd : listen_fd, POLLIN, 0}, {child_fd, POLLIN, 0}};
        if (poll(p, 2, -1) < 0 && errno != EINTR) return 1;
        if (p[1].revents) {
            struct signalfd_siginfo info;
            while (read(child_fd, &info, sizeof info) > 0) {}
        }
        if (p[0].revents && agent_fd < 0) take_agent();
        else if (p[0].revents) {
            struct note n;
            int fds[MAX_FDS];
            size_t size, num_fds;
            if (receive(agent_fd, (uint8_t *)&n, sizeof n, &size, fds, &num_fds) <= 0) return 0;
            if (size == sizeof n && n.kind == SPAWN && num_fds == 4) spawn_child(n.flags, fds);
            else if (size == sizeof n && n.kind == HOLD) hold(&n, fds);
            else if (size == sizeof n && n.kind == LISTEN) listen_for_agent();
        }
        tell_ends();
    }
}

/* The agent's half. */
static int fd_ = -1;
static pid_t pid_;

int nursery_fd(void) { return fd_; }
pid_t nursery_pid(void) { return fd_ >= 0 ? pid_ : 0; }
void nursery_wake(void) { if (fd_ >= 0) kill(pid_, SIGCONT); }

static void give_up(void) {
    close(fd_);
    fd_ = -1;
}

static int start(const struct box *box) {
    int pair[2];
    char num[16], *argv[] = {"/sbin/init", "nursery", num, (char *)box->workdir, NULL}, *env[] = {NULL};
    if (fd_ >= 0) return 0;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair) < 0) return -1;
    snprintf(num, sizeof num, "%d", box->num_processes);
    volatile int failed = 0;
    pid_ = vfork();
    if (pid_ == 0) {
        setsid();
        if (pair[1] == 3) fcntl(3, F_SETFD, 0);
        else dup2(pair[1], 3);
        execve(NURSERY_PROGRAM, argv, env);
        failed = errno;
        _exit(1);
    }
    int number = pid_ < 0 ? errno : failed;
    close(pair[1]);
    if (number) { close(pair[0]); errno = number; return -1; }
    fd_ = pair[0];
    return 0;
}

/* The next message: 1, 0 when none comes. A nursery that is gone or does not answer is given up; its programs become the agent's. */
static int hear(struct note *n, int *fds, size_t *num_fds, int ms) {
    size_t size;
    struct pollfd p = {.fd = fd_, .events = POLLIN};
    int found = poll(&p, 1, ms);
    if (found == 0 && ms == 0) return 0;
    if (found > 0 && receive(fd_, (uint8_t *)n, sizeof *n, &size, fds, num_fds) > 0 && size == sizeof *n) return 1;
    if (found <= 0) kill(pid_, SIGKILL);
    give_up();
    return 0;
}

int nursery_hear(void) {
    struct note n;
    int fds[MAX_FDS], num = 0;
    size_t num_fds;
    while (fd_ >= 0 && hear(&n, fds, &num_fds, 0)) if (n.kind == ENDED) { num++; command_ended(n.pid, n.number, &n.used); }
    return num;
}

/* Until its answer of this kind; ends that come first are told on. */
static int await_note(uint32_t kind, struct note *n) {
    int fds[MAX_FDS];
    size_t num_fds;
    nursery_wake();
    while (fd_ >= 0 && hear(n, fds, &num_fds, WAIT_MS)) {
        if (n->kind == kind) return 1;
        if (n->kind == ENDED) command_ended(n->pid, n->number, &n->used);
    }
    errno = EIO;
    return 0;
}

static void put_words(struct buffer *b, char **words) { for (; *words; words++) put(b, *words, strlen(*words) + 1); }

pid_t nursery_spawn(const struct box *box, char **argv, char **env, const char *cwd, const int std[3], int tty, int *failed) {
    struct buffer text = {0};
    uint32_t num[2] = {0, 0};
    while (argv[num[0]]) num[0]++;
    while (env[num[1]]) num[1]++;
    put(&text, num, 8);
    put(&text, cwd, strlen(cwd) + 1);
    put_words(&text, argv);
    put_words(&text, env);
    struct note n = {.kind = SPAWN, .flags = (uint32_t)tty};
    int fds[] = {memfd_create("words", MFD_CLOEXEC), std[0], std[1], std[2]}, done = 0;
    if (fds[0] >= 0 && write(fds[0], text.data, text.size) == (ssize_t)text.size && start(box) == 0 &&
        send_with(fd_, &n, sizeof n, fds, 4) == 0) done = await_note(SPAWN, &n);
    *failed = done ? n.number : errno ? errno : EIO;
    if (fds[0] >= 0) close(fds[0]);
    drop(&text);
    return done ? n.pid : -1;
}

void nursery_hold(pid_t pid, uint32_t flags, const int fds[3]) {
    struct note n = {.kind = HOLD, .pid = pid, .flags = flags};
    int sent[3];
    size_t num = 0;
    for (int i = 0; i < 3; i++) if (fds[i] >= 0) { n.which |= 1u << i; sent[num++] = fds[i]; }
    if (num && fd_ >= 0) send_with(fd_, &n, sizeof n, sent, num);
}

int nursery_leave(char name[16], uint32_t *num_name) {
    struct note n = {.kind = LISTEN};
    errno = ESRCH;
    if (fd_ < 0 || send_with(fd_, &n, sizeof n, NULL, 0) < 0 || !await_note(LISTEN, &n)) return -1;
    give_up();
    if (n.number) { errno = n.number; return -1; }
    memcpy(name, n.name, sizeof n.name);
    *num_name = n.num_name;
    return n.pid;
}

int nursery_join(const uint8_t *name, uint32_t num_name) {
    struct sockaddr_un at = {.sun_family = AF_UNIX};
    int fds[MAX_FDS];
    size_t num_fds;
    errno = EINVAL;
    if (fd_ >= 0 || !num_name || num_name > sizeof at.sun_path) return -1;
    memcpy(at.sun_path, name, num_name);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&at, (socklen_t)(sizeof at.sun_family + num_name)) < 0) {
        int number = errno;
        if (fd >= 0) close(fd);
        errno = number;
        return -1;
    }
    fd_ = fd;
    for (struct note n; hear(&n, fds, &num_fds, WAIT_MS);) {
        if (n.kind == KEPT) { pid_ = n.pid; return 0; }
        int three[3];
        for (size_t i = 0, k = 0; i < 3; i++) three[i] = n.which >> i & 1 && k < num_fds ? fds[k++] : -1;
        if (n.kind == HOLD) command_kept(n.pid, n.flags, three);
        if (n.kind == ENDED) command_ended(n.pid, n.number, &n.used);
    }
    errno = EIO;
    return -1;
}
