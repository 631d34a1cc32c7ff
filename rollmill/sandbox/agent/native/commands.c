/* The commands of a box: started in sessions of their own, their output kept in bounded memory or streamed within a window. */
#include "box.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAX_LATE (1u << 20) /* read after a command ended: its pipe holds less, so more can only come from what it left behind */
#define MAX_LEFT 256        /* pipes held only by what ended commands left behind, beyond which the oldest is closed */
#define MARK_ROOM 64
#define MIN_MARKED 256

struct head_tail { uint32_t limit; uint8_t *head, *tail; uint32_t num_head, head_room; uint64_t num_tail, total; };

struct input { struct input *next; uint32_t id; size_t size, at; int is_last; uint8_t data[]; };

struct command {
    struct command *next;
    uint32_t id, flags;
    pid_t pid;
    int fds[2];       /* output, error apart; -1 when closed */
    int in_fd;        /* -1 when closed */
    struct input *inputs, **inputs_end;
    struct head_tail kept[2];
    uint32_t unacked; /* streamed and not yet taken by the owner */
    uint64_t late;
    double started;
    int is_timed_out, has_ended, status;
    struct rusage used;
};

static const struct box *box_;
static struct command *commands;
static int left[MAX_LEFT];
static size_t num_left;

void commands_begin(const struct box *box) { box_ = box; }

static void feed(struct head_tail *k, const uint8_t *data, size_t size) {
    k->total += size;
    size_t n = k->limit - k->num_head < size ? k->limit - k->num_head : size;
    if (n) {
        if (k->num_head + n > k->head_room) {
            uint32_t room = k->head_room ? k->head_room : 1024;
            while (room < k->num_head + n) room *= 2;
            if (room > k->limit) room = k->limit;
            uint8_t *grown = realloc(k->head, room);
            if (!grown) _exit(70);
            k->head = grown;
            k->head_room = room;
        }
        memcpy(k->head + k->num_head, data, n);
        k->num_head += (uint32_t)n;
        data += n;
        size -= n;
    }
    if (!size || !k->limit) return;
    if (!k->tail && !(k->tail = malloc(k->limit))) _exit(70);
    if (size > k->limit) { k->num_tail += size - k->limit; data += size - k->limit; size = k->limit; }
    uint32_t at = (uint32_t)(k->num_tail % k->limit);
    size_t first = k->limit - at < size ? k->limit - at : size;
    memcpy(k->tail + at, data, first);
    memcpy(k->tail, data + first, size - first);
    k->num_tail += size;
}

static void put_tail(struct buffer *b, const struct head_tail *k, uint32_t num) {
    uint64_t have = k->num_tail < k->limit ? k->num_tail : k->limit;
    if (num > have) { /* the tail is shorter than asked for: the rest are the last bytes of the head */
        put(b, k->head + k->num_head - (num - have), num - have);
        num = (uint32_t)have;
    }
    uint64_t from = k->num_tail - num;
    for (uint32_t done = 0; done < num;) {
        uint32_t at = (uint32_t)((from + done) % k->limit);
        uint32_t n = k->limit - at < num - done ? k->limit - at : num - done;
        put(b, k->tail + at, n);
        done += n;
    }
}

static void put_kept(struct buffer *b, const struct head_tail *k) {
    if (k->total <= k->limit) { put_text(b, k->head, k->num_head); return; }
    uint32_t kept = k->limit >= MIN_MARKED ? k->limit - MARK_ROOM : k->limit;
    uint32_t num_head = kept - kept / 2, num_tail = kept / 2;
    char mark[MARK_ROOM + 1] = "";
    int num_mark = 0;
    if (k->limit >= MIN_MARKED)
        num_mark = snprintf(mark, sizeof mark, "\n[... %llu bytes left out ...]\n", (unsigned long long)(k->total - num_head - num_tail));
    put_u32(b, num_head + (uint32_t)num_mark + num_tail);
    put(b, k->head, num_head);
    put(b, mark, (size_t)num_mark);
    put_tail(b, k, num_tail);
}

static void say_done(struct command *c, int exit_code, double wall_s) {
    struct buffer body = {0};
    int apart = c->flags & EXEC_APART && !(c->flags & EXEC_STREAM);
    put_u32(&body, (uint32_t)exit_code);
    put_u32(&body, c->is_timed_out ? 1 : 0);
    put_u64(&body, c->kept[0].total);
    put_u64(&body, c->kept[1].total);
    put_f64(&body, wall_s);
    put_f64(&body, (double)c->used.ru_utime.tv_sec + (double)c->used.ru_utime.tv_usec / 1e6);
    put_f64(&body, (double)c->used.ru_stime.tv_sec + (double)c->used.ru_stime.tv_usec / 1e6);
    put_u64(&body, (uint64_t)c->used.ru_maxrss * 1024);
    if (c->flags & EXEC_STREAM) { put_u32(&body, 0); put_u32(&body, 0); }
    else { put_kept(&body, &c->kept[0]); if (apart) put_kept(&body, &c->kept[1]); else put_u32(&body, 0); }
    say(c->id, SAY_DONE, body.data, body.size);
    drop(&body);
}

static struct command *by_id(uint32_t id) {
    for (struct command *c = commands; c; c = c->next) if (c->id == id) return c;
    return NULL;
}

static void close_at(int *fd) { if (*fd >= 0) close(*fd); *fd = -1; }

static void drop_inputs(struct command *c, int number) {
    while (c->inputs) {
        struct input *i = c->inputs;
        c->inputs = i->next;
        if (i->id != c->id) say_error(i->id, number, strerror(number));
        free(i);
    }
    c->inputs_end = &c->inputs;
}

static void free_command(struct command *c) {
    drop_inputs(c, EPIPE);
    close_at(&c->in_fd);
    for (int i = 0; i < 2; i++) { close_at(&c->fds[i]); free(c->kept[i].head); free(c->kept[i].tail); }
    free(c);
}

/* In the child, memory shared with the agent until it execs: only calls that touch nothing of the agent's. */
static int run_child(char **argv, char **env, const char *cwd, const int std[3], int tty) {
    sigset_t none;
    struct sigaction plain = {.sa_handler = SIG_DFL};
    for (int s = 1; s < 32; s++) if (s != SIGKILL && s != SIGSTOP) sigaction(s, &plain, NULL);
    setsid();
    if (tty) ioctl(std[0], TIOCSCTTY, 0);
    for (int i = 0; i < 3; i++) if (dup2(std[i], i) < 0) return errno;
    if (box_->layer_fd >= 0) close(box_->layer_fd); /* or the folder to start in could be that one, by /proc/self/fd */
    if (box_->upper_fd >= 0 && box_->upper_fd != box_->layer_fd) close(box_->upper_fd);
    if (box_->is_contained && syscall(SYS_setresuid, geteuid(), geteuid(), geteuid()) < 0) return errno; /* the agent's real user is its own */
    if (chdir(box_->workdir) < 0) {} /* the agent may have removed it: then where we stand */
    if (cwd[0] && chdir(cwd) < 0) return errno;
    if (box_->num_processes) {
        struct rlimit r = {(rlim_t)box_->num_processes, (rlim_t)box_->num_processes};
        setrlimit(RLIMIT_NPROC, &r);
    }
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    if (strchr(argv[0], '/')) { execve(argv[0], argv, env); return errno; }
    const char *path = "/usr/local/bin:/usr/bin:/bin";
    for (char **e = env; *e; e++) if (!strncmp(*e, "PATH=", 5)) path = *e + 5;
    int worst = ENOENT;
    char full[4096];
    while (*path) {
        size_t n = strcspn(path, ":");
        if ((size_t)snprintf(full, sizeof full, "%.*s%s%s", (int)n, path, n ? "/" : "", argv[0]) < sizeof full) {
            execve(full, argv, env);
            if (errno != ENOENT && errno != ENOTDIR) worst = errno;
        }
        path += n + (path[n] == ':');
    }
    return worst;
}

static char **merged_env(char **base, char **extra, size_t num_extra) {
    size_t num_base = 0, n = 0;
    while (base[num_base]) num_base++;
    char **env = malloc((num_base + num_extra + 1) * sizeof *env);
    if (!env) _exit(70);
    for (size_t i = 0; i < num_base; i++) {
        size_t name = strcspn(base[i], "="), replaced = 0;
        for (size_t j = 0; j < num_extra; j++) replaced |= !strncmp(extra[j], base[i], name + 1);
        if (!replaced) env[n++] = base[i];
    }
    for (size_t j = 0; j < num_extra; j++) env[n++] = extra[j];
    env[n] = NULL;
    return env;
}

struct ends { int ours[3], theirs[3]; int tty; };

static int open_ends(struct ends *e, uint32_t flags, int has_input) {
    for (int i = 0; i < 3; i++) e->ours[i] = e->theirs[i] = -1;
    e->tty = !!(flags & EXEC_PTY);
    int p[2];
    if (e->tty) {
        int master = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC), zero = 0, number;
        char name[32];
        if (master < 0) return -1;
        e->ours[1] = master;
        if (ioctl(master, TIOCSPTLCK, &zero) < 0 || ioctl(master, TIOCGPTN, &number) < 0) return -1;
        snprintf(name, sizeof name, "/dev/pts/%d", number);
        struct winsize size = {.ws_row = 24, .ws_col = 80};
        ioctl(master, TIOCSWINSZ, &size);
        for (int i = 0; i < 3; i++) if ((e->theirs[i] = open(name, O_RDWR | O_NOCTTY | O_CLOEXEC)) < 0) return -1;
        if ((e->ours[0] = fcntl(master, F_DUPFD_CLOEXEC, 3)) < 0) return -1;
        return 0;
    }
    if (has_input) {
        if (pipe2(p, O_CLOEXEC) < 0) return -1;
        e->theirs[0] = p[0]; e->ours[0] = p[1];
    } else if ((e->theirs[0] = open("/dev/null", O_RDONLY | O_CLOEXEC)) < 0) return -1;
    if (pipe2(p, O_CLOEXEC) < 0) return -1;
    e->theirs[1] = p[1]; e->ours[1] = p[0];
    if (!(flags & EXEC_APART)) return (e->theirs[2] = fcntl(p[1], F_DUPFD_CLOEXEC, 3)) < 0 ? -1 : 0;
    if (pipe2(p, O_CLOEXEC) < 0) return -1;
    e->theirs[2] = p[1]; e->ours[2] = p[0];
    return 0;
}

struct start { char **argv, **env; const char *cwd; const int *std; int tty; volatile int why; };

static int child_main(void *arg) {
    struct start *s = arg;
    s->why = run_child(s->argv, s->env, s->cwd, s->std, s->tty);
    _exit(127);
}

/* Our memory is the child's until it execs, and we wait for that, but never for ever: a program of the box may stop the child, or hold
   a lease on what it execs. What has not begun within a second is killed, like any command. */
pid_t spawn(char **argv, char **env, const char *cwd, const int std[3], int tty, int *failed) {
    static uint8_t stack[1 << 16] __attribute__((aligned(16)));
    struct start s = {argv, env, cwd, std, tty, 0};
    int told[2];
    sigset_t all, old;
    if (pipe2(told, O_CLOEXEC) < 0) { *failed = errno; return -1; }
    sigfillset(&all);
    sigprocmask(SIG_SETMASK, &all, &old);
    pid_t pid = clone(child_main, stack + sizeof stack, CLONE_VM | SIGCHLD, &s);
    int number = errno;
    close(told[1]);
    struct pollfd p = {.fd = told[0], .events = POLLIN};
    for (int tries = 0; pid > 0 && poll(&p, 1, tries < 50 ? 20 : -1) == 0;) kill(pid, ++tries < 50 ? SIGCONT : SIGKILL);
    close(told[0]); /* hung up: the child has execed or ended */
    sigprocmask(SIG_SETMASK, &old, NULL);
    if (pid < 0) { *failed = number; return -1; }
    if (s.why) { waitpid(pid, NULL, 0); *failed = s.why; return -1; }
    /* The worst score, so that the kernel takes the command and never the agent. From here: until it execs, the child is as closed to
       itself as the agent is to the programs of its user. */
    char name[64];
    snprintf(name, sizeof name, "/proc/%d/oom_score_adj", (int)pid);
    int fd = box_->is_contained ? open(name, O_WRONLY | O_CLOEXEC) : -1;
    if (fd >= 0) { if (write(fd, "1000", 4) < 0) {} close(fd); }
    return pid;
}

static void add_input(struct command *c, uint32_t id, const uint8_t *data, size_t size, int is_last) {
    struct input *i = malloc(sizeof *i + size);
    if (!i) _exit(70);
    *i = (struct input){.id = id, .size = size, .is_last = is_last};
    if (size) memcpy(i->data, data, size);
    *c->inputs_end = i;
    c->inputs_end = &i->next;
}

void command_start(uint32_t id, struct cursor body) {
    uint32_t flags = get_u32(&body), limit = get_u32(&body), num_stdin;
    size_t argc = get_u16(&body), envc = get_u16(&body);
    char **argv = calloc(argc + 1, sizeof *argv), **extra = calloc(envc + 1, sizeof *extra), *cwd;
    if (!argv || !extra) _exit(70);
    int bad = argc == 0;
    for (size_t i = 0; i < argc; i++) bad |= !(argv[i] = get_string(&body));
    for (size_t i = 0; i < envc; i++) bad |= !(extra[i] = get_string(&body)) || !strchr(extra[i], '=');
    bad |= !(cwd = get_string(&body));
    const uint8_t *stdin_bytes = get_text(&body, &num_stdin);
    if (bad || body.bad || limit > MAX_BODY / 4) {
        say_error(id, EINVAL, "a command needs a program, words without NUL and a limit below 16 MiB");
        free(argv); free(extra);
        return;
    }
    struct command *c = calloc(1, sizeof *c);
    if (!c) _exit(70);
    *c = (struct command){.id = id, .flags = flags, .in_fd = -1, .started = now_s()};
    c->fds[0] = c->fds[1] = -1;
    c->kept[0].limit = c->kept[1].limit = limit;
    c->inputs_end = &c->inputs;
    struct ends e;
    int failed = 0;
    char **env = merged_env(box_->env, extra, envc);
    if (open_ends(&e, flags, num_stdin || flags & EXEC_STREAM) < 0) failed = -errno;
    else if (box_->has_nursery) c->pid = nursery_spawn(box_, argv, env, cwd, e.theirs, e.tty, &failed);
    else c->pid = spawn(argv, env, cwd, e.theirs, e.tty, &failed);
    for (int i = 0; i < 3; i++) if (e.theirs[i] >= 0) close(e.theirs[i]);
    c->in_fd = e.ours[0]; c->fds[0] = e.ours[1]; c->fds[1] = e.ours[2];
    if (failed) {
        char words[512];
        int number = failed < 0 ? -failed : failed;
        snprintf(words, sizeof words, "%.400s: %s\n", failed == ENOENT && cwd[0] && access(cwd, F_OK) ? cwd : argv[0], strerror(number));
        if (failed < 0 || flags & EXEC_STREAM) { words[strlen(words) - 1] = 0; say_error(id, number, words); }
        else {
            feed(&c->kept[c->flags & EXEC_APART ? 1 : 0], (uint8_t *)words, strlen(words));
            say_done(c, number == ENOENT ? 127 : 126, now_s() - c->started);
        }
        free_command(c);
    } else {
        for (int i = 0; i < 2; i++) if (c->fds[i] >= 0) fcntl(c->fds[i], F_SETFL, O_NONBLOCK);
        if (c->in_fd >= 0) fcntl(c->in_fd, F_SETFL, O_NONBLOCK);
        if (num_stdin) add_input(c, id, stdin_bytes, num_stdin, !(flags & EXEC_STREAM));
        c->next = commands;
        commands = c;
        uint32_t pid = (uint32_t)c->pid;
        if (flags & EXEC_STREAM) say(id, SAY_STARTED, &pid, 4);
    }
    free(env); free(argv); free(extra);
}

void command_input(uint32_t id, struct cursor body) {
    struct command *c = by_id(get_u32(&body));
    if (body.bad || !c || !(c->flags & EXEC_STREAM) || c->in_fd < 0) { say_error(id, EPIPE, "the command takes no more input"); return; }
    size_t size = (size_t)(body.end - body.at);
    add_input(c, id, body.at, size, size == 0);
}

void command_signal(struct cursor body) {
    struct command *c = by_id(get_u32(&body));
    uint32_t number = get_u32(&body), is_timeout = get_u32(&body);
    if (body.bad || !c || c->has_ended || number == 0 || number > 64) return;
    if (is_timeout) c->is_timed_out = 1;
    kill(-c->pid, (int)number);
    if (number == SIGKILL || number == SIGTERM) kill(-c->pid, SIGCONT);
}

void command_resize(struct cursor body) {
    struct command *c = by_id(get_u32(&body));
    uint32_t rows = get_u32(&body), columns = get_u32(&body);
    if (body.bad || !c || !(c->flags & EXEC_PTY) || c->fds[0] < 0) return;
    struct winsize size = {.ws_row = (unsigned short)rows, .ws_col = (unsigned short)columns};
    ioctl(c->fds[0], TIOCSWINSZ, &size);
}

static void finish_if_drained(struct command *c);

void command_taken(struct cursor body) {
    struct command *c = by_id(get_u32(&body));
    uint32_t size = get_u32(&body);
    if (!body.bad && c) c->unacked -= size < c->unacked ? size : c->unacked;
}

static int may_read(const struct command *c) { return !(c->flags & EXEC_STREAM) || c->unacked < WINDOW; }

/* How much came; 0: nothing now; the descriptor is closed at its end. */
static size_t drain(struct command *c, int which) {
    static uint8_t chunk[4 + (1 << 16)];
    ssize_t n = read(c->fds[which], chunk + 4, sizeof chunk - 4);
    if (n < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
    if (n <= 0) { close_at(&c->fds[which]); return 0; } /* a terminal whose last user left says EIO */
    if (c->flags & EXEC_STREAM) {
        uint32_t is_stderr = (uint32_t)which;
        memcpy(chunk, &is_stderr, 4);
        say(c->id, SAY_OUTPUT, chunk, (size_t)n + 4);
        c->unacked += (uint32_t)n;
        c->kept[which].total += (uint64_t)n;
    } else feed(&c->kept[which], chunk + 4, (size_t)n);
    return (size_t)n;
}

static void feed_input(struct command *c) {
    while (c->inputs) {
        struct input *i = c->inputs;
        ssize_t n = i->size > i->at ? write(c->in_fd, i->data + i->at, i->size - i->at) : 0;
        if (n < 0 && (errno == EAGAIN || errno == EINTR)) return;
        if (n < 0) { close_at(&c->in_fd); drop_inputs(c, EPIPE); return; }
        i->at += (size_t)n;
        if (i->at < i->size) continue;
        if (i->id != c->id) say(i->id, SAY_OK, NULL, 0);
        if (i->is_last) {
            char end_of_text = 4;
            if (c->flags & EXEC_PTY) { if (write(c->in_fd, &end_of_text, 1) < 0) {} }
            close_at(&c->in_fd);
        }
        if (!(c->inputs = i->next)) c->inputs_end = &c->inputs;
        free(i);
        if (c->in_fd < 0) { drop_inputs(c, EPIPE); return; }
    }
}

size_t commands_num_fds(void) {
    size_t n = num_left + 1;
    for (struct command *c = commands; c; c = c->next) n += 3;
    return n;
}

size_t commands_poll(struct pollfd *fds, size_t room) {
    size_t n = 0;
    for (struct command *c = commands; c && n + 3 <= room; c = c->next) {
        for (int i = 0; i < 2; i++) if (c->fds[i] >= 0 && may_read(c)) fds[n++] = (struct pollfd){.fd = c->fds[i], .events = POLLIN};
        if (c->in_fd >= 0 && c->inputs) fds[n++] = (struct pollfd){.fd = c->in_fd, .events = POLLOUT};
    }
    for (size_t i = 0; i < num_left && n < room; i++) fds[n++] = (struct pollfd){.fd = left[i], .events = POLLIN};
    if (nursery_fd() >= 0 && n < room) fds[n++] = (struct pollfd){.fd = nursery_fd(), .events = POLLIN};
    return n;
}

static void drain_left(int fd) {
    static uint8_t chunk[1 << 16];
    ssize_t n = read(fd, chunk, sizeof chunk);
    if (n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR))) return;
    for (size_t i = 0; i < num_left; i++) if (left[i] == fd) { close(fd); left[i] = left[--num_left]; return; }
}

static void keep_left(int *fd) {
    if (*fd < 0) return;
    if (num_left == MAX_LEFT) { close(left[0]); memmove(left, left + 1, --num_left * sizeof *left); }
    left[num_left++] = *fd;
    *fd = -1;
}

/* The command itself has ended: answer once what it printed has been read, leave its pipes to what it left behind. */
static void finish_if_drained(struct command *c) {
    if (!c->id) return; /* restored, and nobody has asked for it yet: its end is told to who does */
    for (int i = 0; i < 2; i++)
        while (c->fds[i] >= 0 && may_read(c) && c->late < MAX_LATE) {
            size_t n = drain(c, i);
            if (n == 0) break;
            c->late += n;
        }
    if (!may_read(c) && c->late < MAX_LATE && (c->fds[0] >= 0 || c->fds[1] >= 0)) return; /* once the owner took some */
    int code = WIFSIGNALED(c->status) ? -WTERMSIG(c->status) : WEXITSTATUS(c->status);
    say_done(c, code, now_s() - c->started);
    if (c->flags & EXEC_PTY) close_at(&c->fds[0]);
    for (int i = 0; i < 2; i++) keep_left(&c->fds[i]);
    for (struct command **p = &commands; *p; p = &(*p)->next) if (*p == c) { *p = c->next; break; }
    free_command(c);
}

void commands_ready(const struct pollfd *fds, size_t num) {
    for (size_t i = 0; i < num; i++) {
        if (!fds[i].revents || fds[i].fd == nursery_fd()) continue;
        struct command *c = commands;
        while (c && c->fds[0] != fds[i].fd && c->fds[1] != fds[i].fd && c->in_fd != fds[i].fd) c = c->next;
        if (!c) drain_left(fds[i].fd);
        else if (c->in_fd == fds[i].fd) feed_input(c);
        else if (may_read(c)) drain(c, c->fds[1] == fds[i].fd);
    }
    for (struct command *c = commands, *next; c; c = next) {
        next = c->next;
        if (c->has_ended) finish_if_drained(c);
    }
}

int commands_reap(void) {
    int status, num = nursery_hear();
    struct rusage used;
    pid_t pid;
    while ((pid = wait4(-1, &status, WNOHANG, &used)) > 0) {
        num++;
        command_ended(pid, status, &used);
    }
    return num;
}

void command_ended(pid_t pid, int status, const struct rusage *used) {
    struct command *c = commands;
    while (c && c->pid != pid) c = c->next;
    if (!c || c->has_ended) return;
    c->has_ended = 1;
    c->status = status;
    c->used = *used;
    finish_if_drained(c);
}

/* Everything goes to the nursery, which will give it to whoever asks after the dump: this agent says nothing of it any more. */
void commands_leave(uint32_t id) {
    char name[16];
    uint32_t num_name;
    if (nursery_pid() == 0) { say_error(id, ESRCH, "no program of the box runs"); return; }
    for (struct command *c = commands; c; c = c->next) {
        int fds[3] = {c->in_fd, c->fds[0], c->fds[1]};
        if (c->has_ended) c->late = MAX_LATE; /* told now, whatever of its output is still unread */
        else nursery_hold(c->pid, c->flags & EXEC_PTY, fds);
    }
    for (size_t i = 0; i < num_left; i++) nursery_hold(0, 0, (int[]){-1, left[i], -1});
    int pid = nursery_leave(name, &num_name);
    if (pid < 0) { say_error(id, errno, "the parent of the box's programs was stopped or ended by one of them"); return; }
    for (struct command *c = commands, *next; c; c = next) { next = c->next; if (c->has_ended) finish_if_drained(c); }
    while (commands) { struct command *c = commands; commands = c->next; free_command(c); }
    while (num_left) close(left[--num_left]);
    struct buffer body = {0};
    put_u32(&body, (uint32_t)pid);
    put_text(&body, name, num_name);
    say(id, SAY_OK, body.data, body.size);
    drop(&body);
}

void commands_join(uint32_t id, struct cursor body) {
    uint32_t num_name;
    const uint8_t *name = get_text(&body, &num_name);
    if (body.bad || nursery_join(name, num_name) < 0) say_error(id, body.bad ? EINVAL : errno, "the restored programs are not to be found");
    else say(id, SAY_OK, NULL, 0);
}

/* Of a program that an earlier agent started: its output is thrown away until somebody adopts it. */
void command_kept(pid_t pid, uint32_t flags, const int fds[3]) {
    for (int i = 0; i < 3; i++) if (fds[i] >= 0) fcntl(fds[i], F_SETFL, fcntl(fds[i], F_GETFL) | O_NONBLOCK);
    if (!pid) { for (int i = 0; i < 3; i++) { int fd = fds[i]; keep_left(&fd); } return; }
    struct command *c = calloc(1, sizeof *c);
    if (!c) _exit(70);
    *c = (struct command){.flags = flags, .pid = pid, .fds = {fds[1], fds[2]}, .in_fd = fds[0], .started = now_s(), .next = commands};
    c->inputs_end = &c->inputs;
    commands = c;
}

void command_adopt(uint32_t id, struct cursor body) {
    uint32_t pid = get_u32(&body);
    struct command *c = commands;
    while (c && (c->pid != (pid_t)pid || c->id)) c = c->next;
    if (body.bad || !c) { say_error(id, ESRCH, "no such program was restored"); return; }
    c->id = id;
    c->flags |= EXEC_STREAM | EXEC_APART;
    say(id, SAY_STARTED, &pid, 4);
    if (c->has_ended) finish_if_drained(c);
}
