/* The agent's loop: cuts frames from the owner's stream, has each answered exactly once, never waits for a process of the box.
 *
 * Both directions are non-blocking: an owner that does not read holds up only the commands whose output it asked to stream.
 */
#include "box.h"
#include <errno.h>
#include <fcntl.h>
#include <math.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

static struct buffer out, in;
static size_t out_sent;
static int out_fd_;
static const struct box *box_;

static struct { int active, killed; uint32_t id, num; double deadline; } ending;

void say(uint32_t id, uint32_t kind, const void *body, size_t size) {
    put_u32(&out, (uint32_t)size);
    put_u32(&out, id);
    put_u32(&out, kind);
    put(&out, body, size);
}

void say_error(uint32_t id, int number, const char *message) {
    struct buffer body = {0};
    put_u32(&body, (uint32_t)number);
    put_text(&body, message, strlen(message));
    say(id, SAY_ERROR, body.data, body.size);
    drop(&body);
}

size_t num_unsent(void) { return out.size - out_sent; }

/* 0 when the owner is gone. */
static int flush(void) {
    while (out_sent < out.size) {
        ssize_t n = write(out_fd_, out.data + out_sent, out.size - out_sent);
        if (n < 0 && errno == EINTR) continue;
        if (n < 0) return errno == EAGAIN;
        out_sent += (size_t)n;
    }
    out_sent = out.size = 0;
    if (out.room > (1u << 20)) drop(&out);
    return 1;
}

static int flush_all(void) {
    struct pollfd p = {.fd = out_fd_, .events = POLLOUT};
    while (flush() && out.size) if (poll(&p, 1, 10000) <= 0) return 0;
    return out.size == 0;
}

static int give_layer(uint32_t id) {
    if (box_->layer_fd < 0) { say_error(id, ENOTSUP, "this box has no layer that can be given away"); return 0; }
    if (!flush_all()) return 1;
    uint32_t head[3] = {0, id, SAY_OK};
    struct iovec iov = {head, sizeof head};
    union { struct cmsghdr align; char room[CMSG_SPACE(sizeof(int))]; } control;
    struct msghdr m = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control.room, .msg_controllen = sizeof control.room};
    struct cmsghdr *c = CMSG_FIRSTHDR(&m);
    c->cmsg_level = SOL_SOCKET; c->cmsg_type = SCM_RIGHTS; c->cmsg_len = CMSG_LEN(sizeof(int));
    memcpy(CMSG_DATA(c), &box_->layer_fd, sizeof(int));
    if (sendmsg(out_fd_, &m, MSG_NOSIGNAL) < 0) { say_error(id, errno, strerror(errno)); return 0; }
    return 1;
}

static void check_ended(void) {
    if (!ending.active) return;
    if (kill(-1, 0) == 0) {
        if (!ending.killed && now_s() >= ending.deadline) { kill(-1, SIGKILL); ending.killed = 1; }
        return;
    }
    ending.active = 0;
    say(ending.id, SAY_OK, &ending.num, 4);
}

static void end_all(uint32_t id, struct cursor body) {
    double grace = get_f64(&body);
    if (body.bad || !(grace >= 0)) { say_error(id, EINVAL, "malformed request"); return; }
    if (ending.active) { say_error(id, EALREADY, "already ending"); return; }
    ending.active = 1; ending.killed = grace == 0; ending.id = id; ending.num = 0; ending.deadline = now_s() + grace;
    kill(-1, SIGCONT);
    kill(-1, grace == 0 ? SIGKILL : SIGTERM);
    check_ended();
}

/* 1 when the agent must end. */
static int answer(uint32_t id, uint32_t kind, struct cursor body) {
    switch (kind) {
    case ASK_EXEC: command_start(id, body); break;
    case ASK_INPUT: command_input(id, body); break;
    case ASK_SIGNAL: command_signal(body); break;
    case ASK_RESIZE: command_resize(body); break;
    case ASK_TAKEN: command_taken(body); break;
    case ASK_LEAVE: commands_leave(id); break;
    case ASK_JOIN: commands_join(id, body); break;
    case ASK_ADOPT: command_adopt(id, body); break;
    case ASK_READ: file_read(id, body); break;
    case ASK_WRITE: file_write(id, body); break;
    case ASK_LIST: file_list(id, body); break;
    case ASK_STAT: file_stat(id, body); break;
    case ASK_WORLD: file_world(id, body); break;
    case ASK_DIFF: file_diff(id, body); break;
    case ASK_PROCESSES: list_processes(id); break;
    case ASK_PING: say(id, SAY_OK, NULL, 0); break;
    case ASK_FREEZE: return give_layer(id);
    case ASK_END_ALL: case ASK_SUSPEND: case ASK_RESUME:
        if (!box_->is_contained) { say_error(id, ENOTSUP, "this agent is not alone with its box"); break; }
        if (kind == ASK_END_ALL) { end_all(id, body); break; }
        kill(-1, kind == ASK_SUSPEND ? SIGSTOP : SIGCONT);
        nursery_wake();
        say(id, SAY_OK, NULL, 0);
        break;
    default: say_error(id, EINVAL, "no such request");
    }
    return 0;
}

/* The whole frames in `in`: 0 go on, 1 end. */
static int answer_frames(void) {
    size_t at = 0;
    int end = 0;
    while (!end && in.size - at >= 12) {
        uint32_t head[3];
        memcpy(head, in.data + at, 12);
        if (head[0] > MAX_BODY) return 1; /* out of step: nothing that follows can be trusted */
        if (in.size - at - 12 < head[0]) break;
        struct cursor body = {in.data + at + 12, in.data + at + 12 + head[0], 0};
        at += 12 + head[0];
        end = answer(head[1], head[2], body);
    }
    memmove(in.data, in.data + at, in.size - at);
    in.size -= at;
    if (in.size == 0 && in.room > (1u << 20)) drop(&in);
    return end;
}

/* 0: the owner hung up. */
static int hear(int fd) {
    static uint8_t chunk[1 << 16];
    ssize_t n = read(fd, chunk, sizeof chunk);
    if (n < 0) return errno == EAGAIN || errno == EINTR;
    put(&in, chunk, (size_t)n);
    return n > 0;
}

int serve(int in_fd, int out_fd, const struct box *box) {
    sigset_t children;
    sigemptyset(&children);
    sigaddset(&children, SIGCHLD);
    sigprocmask(SIG_BLOCK, &children, NULL);
    signal(SIGPIPE, SIG_IGN);
    int child_fd = signalfd(-1, &children, SFD_NONBLOCK | SFD_CLOEXEC);
    if (child_fd < 0) return 1;
    fcntl(in_fd, F_SETFL, fcntl(in_fd, F_GETFL) | O_NONBLOCK);
    fcntl(out_fd, F_SETFL, fcntl(out_fd, F_GETFL) | O_NONBLOCK);
    out_fd_ = out_fd;
    box_ = box;
    in.size = out.size = out_sent = 0; /* a stream that broke may have left half a frame */
    commands_begin(box);
    files_begin(box);
    double end = box->lifetime_s > 0 ? now_s() + box->lifetime_s : INFINITY;
    struct pollfd *fds = NULL;
    for (;;) {
        if (!flush()) break;
        size_t room = 3 + commands_num_fds();
        struct pollfd *grown = realloc(fds, room * sizeof *fds);
        if (!grown) _exit(70);
        fds = grown;
        fds[0] = (struct pollfd){.fd = in_fd, .events = POLLIN};
        fds[1] = (struct pollfd){.fd = child_fd, .events = POLLIN};
        fds[2] = (struct pollfd){.fd = out.size ? out_fd : -1, .events = POLLOUT};
        size_t num = commands_poll(fds + 3, room - 3);
        double until = ending.active && !ending.killed && ending.deadline < end ? ending.deadline : end;
        int ms = isinf(until) ? -1 : until <= now_s() ? 0 : (int)((until - now_s()) * 1000) + 1;
        if (poll(fds, 3 + num, ms) < 0 && errno != EINTR) return 1;
        if (now_s() >= end) {
            static const char why[] = "its lifetime ended";
            struct buffer body = {0};
            put_u32(&body, 0);
            put_text(&body, why, sizeof why - 1);
            say(0, SAY_LAST_WORDS, body.data, body.size);
            flush();
            return 1;
        }
        commands_ready(fds + 3, num);
        if (fds[1].revents) {
            struct signalfd_siginfo info;
            while (read(child_fd, &info, sizeof info) > 0) {}
        }
        if (fds[1].revents || nursery_fd() >= 0) ending.num += (uint32_t)commands_reap();
        check_ended();
        if (fds[0].revents & (POLLIN | POLLHUP | POLLERR)) {
            if (!hear(in_fd)) break;
            if (answer_frames()) { flush(); return 1; }
        }
    }
    close(child_fd);
    free(fds);
    return 0;
}
