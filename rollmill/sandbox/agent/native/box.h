/* The agent and the zygote of a box: what the files of this program share. docs/formats/agent.md has the frames. */
#ifndef ROLLMILL_BOX_H
#define ROLLMILL_BOX_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define PROTOCOL 1
#define WINDOW (256u << 10)
#define MAX_BODY (64u << 20)

enum { ASK_EXEC = 1, ASK_INPUT, ASK_SIGNAL, ASK_RESIZE, ASK_READ, ASK_WRITE, ASK_LIST, ASK_STAT, ASK_WORLD, ASK_DIFF,
       ASK_PROCESSES, ASK_END_ALL, ASK_SUSPEND, ASK_RESUME, ASK_FREEZE, ASK_PING, ASK_TAKEN, ASK_LEAVE, ASK_JOIN, ASK_ADOPT };
enum { SAY_DONE = 129, SAY_OUTPUT, SAY_OK, SAY_ERROR, SAY_HELLO, SAY_LAST_WORDS, SAY_STARTED };
enum { EXEC_APART = 1, EXEC_STREAM = 2, EXEC_PTY = 4 };
enum { FACT_PROC = 1, FACT_IDMAP = 2, FACT_MEMORY_GROUP = 4, FACT_SECCOMP = 8 };

/* bytes.c: a buffer that grows, and a cursor that reads a body from front to back and remembers whether it ran over the end. */
struct buffer { uint8_t *data; size_t size, room; };
void put(struct buffer *b, const void *data, size_t size);
void put_u32(struct buffer *b, uint32_t v);
void put_u64(struct buffer *b, uint64_t v);
void put_f64(struct buffer *b, double v);
void put_text(struct buffer *b, const void *data, size_t size);
void drop(struct buffer *b);

struct cursor { const uint8_t *at, *end; int bad; };
uint32_t get_u32(struct cursor *c);
uint16_t get_u16(struct cursor *c);
uint64_t get_u64(struct cursor *c);
double get_f64(struct cursor *c);
const uint8_t *get_text(struct cursor *c, uint32_t *size);
/* A C string inside the body, NUL put at its end by moving it one byte down over its length; NULL when it holds a NUL. */
char *get_string(struct cursor *c);

double now_s(void);

/* What the agent knows of the box it serves. */
struct box {
    const char *workdir;
    char **env;           /* the base environment, NULL at the end */
    int upper_fd;         /* the writable layer's folder, or -1 */
    int layer_fd;         /* the same as a mount that can be stacked, or -1 */
    int num_processes;    /* bound for what it starts, 0: none */
    double lifetime_s;    /* 0: none */
    int is_contained;     /* every process it may signal belongs to the box */
    int has_nursery;      /* its programs are one tree, which can be dumped */
};

/* serve.c: answers until the owner hangs up (0), the lifetime ends or the layer was given away (1). */
int serve(int in_fd, int out_fd, const struct box *box);
/* For the parts: queue one answer. */
void say(uint32_t id, uint32_t kind, const void *body, size_t size);
void say_error(uint32_t id, int number, const char *message);
size_t num_unsent(void);

/* commands.c */
struct pollfd;
void commands_begin(const struct box *box);
void command_start(uint32_t id, struct cursor body);
void command_input(uint32_t id, struct cursor body);
void command_signal(struct cursor body);
void command_resize(struct cursor body);
void command_taken(struct cursor body);
size_t commands_poll(struct pollfd *fds, size_t room);
void commands_ready(const struct pollfd *fds, size_t num);
int commands_reap(void); /* how many children ended */
size_t commands_num_fds(void);
void commands_leave(uint32_t id);
void commands_join(uint32_t id, struct cursor body);
void command_adopt(uint32_t id, struct cursor body);
struct rusage;
void command_ended(pid_t pid, int status, const struct rusage *used);
void command_kept(pid_t pid, uint32_t flags, const int fds[3]);
pid_t spawn(char **argv, char **env, const char *cwd, const int std[3], int tty, int *failed);

/* nursery.c: the agent's half. */
#define NURSERY_PROGRAM "/dev/initctl"
int nursery_fd(void);     /* to poll; -1: none runs */
pid_t nursery_pid(void);  /* 0: none runs */
int nursery_hear(void);   /* how many programs ended */
void nursery_wake(void);
pid_t nursery_spawn(const struct box *box, char **argv, char **env, const char *cwd, const int std[3], int tty, int *failed);
void nursery_hold(pid_t pid, uint32_t flags, const int fds[3]);
int nursery_leave(char name[16], uint32_t *num_name); /* its pid, or -1 with errno */
int nursery_join(const uint8_t *name, uint32_t num_name);

/* files.c */
void file_read(uint32_t id, struct cursor body);
void file_write(uint32_t id, struct cursor body);
void file_list(uint32_t id, struct cursor body);
void file_stat(uint32_t id, struct cursor body);
void file_world(uint32_t id, struct cursor body);
void file_diff(uint32_t id, struct cursor body);
void list_processes(uint32_t id);
void files_begin(const struct box *box);

/* The programs in this binary. */
int zygote_main(int argc, char **argv);
int guest_main(void);
int stdio_main(int argc, char **argv);
int nursery_main(int argc, char **argv);
int join_main(int argc, char **argv);
#endif
