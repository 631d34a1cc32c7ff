/* What the zygote, its helper that opens layers, and the boxes share; the messages are laid out in docs/formats/agent.md. */
#ifndef ROLLMILL_CAGE_H
#define ROLLMILL_CAGE_H
#include "box.h"
#include <sys/resource.h>

#define MAX_FDS 253 /* the most that one message carries */
#define MAX_PORTS 32
#define MAX_GRAFTS 16

enum { ORDER_ROOT = 1, ORDER_EGRESS = 2, ORDER_BARE = 4, ORDER_HOST = 8, ORDER_LIVE = 16 };
enum { NEWS_PREPARED = 1, NEWS_TAKEN, NEWS_FAILED };

struct settings {
    int is_rootless, groups;      /* groups: 0 none, 1, 2: version of control groups */
    uint32_t pool_low, pool_high, num_preparing;
    uint32_t id_base, num_ids;    /* ids 0.. of a box are id_base.. here; one id: id_base is `dev` */
    int memory_fd, cpu_fd;        /* folders of our control groups, or -1 */
    int orders_fd, news_fd, proc_fd, template_fd;
    const uint8_t *filter;
    uint32_t num_filter;
    char *grafts[MAX_GRAFTS];     /* mounts of the template that a box of the host's image takes along */
    size_t num_grafts;
    int has_idmap;
    int by_path;                  /* this kernel stacks attached mounts only: layers are moved into the box before they are stacked */
    int user_xattr;               /* overlays may note what they hide in user attributes */
    char stage[16];               /* a folder that nothing shown lies below */
};

/* kernel.c: calls that the C library may lack; each returns -1 with errno. */
int sys_fsopen(const char *kind);
int sys_fsmount(int fs, unsigned attributes);
int sys_open_tree(int folder, const char *path, unsigned flags);
int sys_move_mount(int from, const char *from_path, int to, const char *to_path);
int sys_set_attributes(int fd, const char *path, unsigned flags, uint64_t set, int userns);
int sys_fspick(int fd);
int fs_string(int fs, const char *key, const char *value);
int fs_flag(int fs, const char *key);
int fs_fd(int fs, const char *key, int fd);
int fs_do(int fs, int command);
int sys_pivot_root(const char *new_root, const char *put_old);
void keep_only(const int *fds, size_t num);
int write_at(int folder, const char *path, const char *text);
int make_userns(const struct settings *s, uid_t maker, rlim_t num_processes);
int open_below(int root, const char *path, int flags, mode_t mode);
int receive(int fd, uint8_t *data, size_t room, size_t *size, int *fds, size_t *num_fds);
int send_with(int fd, const void *data, size_t size, const int *fds, size_t num_fds);

#define TREE_CLONE 1u
#define TREE_CLOEXEC 02000000u
#define TREE_RECURSIVE 0x8000u
#define TREE_EMPTY 0x1000u
#define ATTR_RDONLY 1u
#define ATTR_NOSUID 2u
#define ATTR_NODEV 4u
#define ATTR_NOEXEC 8u
#define ATTR_IDMAP 0x00100000u
#define FS_CREATE 6
#define FS_RECONFIGURE 7

/* template.c: the read-only root that boxes of the host's image are stacked on; 0, or -1 with the step that failed. */
int enter_template(struct settings *s, struct cursor *plan, const char **step);

/* cage.c: the life of a box, from the fork to its end. */
void live(const struct settings *s, uint32_t slot, uint32_t serial, uint32_t group) __attribute__((noreturn));

/* opener.c: turns paths of the host into layers, until its owner hangs up. */
void open_layers(const struct settings *s, int fd, int ready_fd) __attribute__((noreturn));
#endif
