/* The root that boxes of the host's image are stacked on: a small tmpfs with the host's programs bound into it, read-only. */
#include "cage.h"
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <unistd.h>

static const char *stage;
static uint32_t root_id;
static int chowns;

static void own(const char *path, uint32_t id) { if (chowns && lchown(path, root_id + id, root_id + id) < 0) {} }

static int make_folders(const char *path, int is_file) {
    char full[PATH_MAX];
    if (snprintf(full, sizeof full, "%s%s", stage, path) >= PATH_MAX) { errno = ENAMETOOLONG; return -1; }
    for (char *slash = strchr(full + strlen(stage) + 1, '/');; slash = strchr(slash + 1, '/')) {
        if (!slash && is_file) return 0;
        if (slash) *slash = 0;
        if (mkdir(full, 0755) == 0) own(full, 0);
        else if (errno != EEXIST) return -1;
        if (!slash) return 0;
        *slash = '/';
    }
}

static int put_file(const char *path, uint32_t mode, uint32_t id, const uint8_t *data, size_t size) {
    char full[PATH_MAX];
    if (make_folders(path, 1) < 0) return -1;
    snprintf(full, sizeof full, "%s%s", stage, path);
    int fd = open(full, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, mode);
    if (fd < 0) return -1;
    ssize_t n = write(fd, data, size);
    fchmod(fd, mode);
    close(fd);
    own(full, id);
    return n == (ssize_t)size ? 0 : -1;
}

/* Show a folder of the host read-only at `to` below the stage, with the host's ids as the box's where the file system can. */
static int bind_folder(struct settings *s, int userns, const char *from, const char *to) {
    char full[PATH_MAX];
    snprintf(full, sizeof full, "%s%s", stage, to);
    int fd = sys_open_tree(AT_FDCWD, from, TREE_CLONE | TREE_RECURSIVE);
    if (fd < 0) return -1;
    unsigned flags = TREE_EMPTY | TREE_RECURSIVE;
    uint64_t plain = ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV;
    if (userns < 0 || sys_set_attributes(fd, "", flags, plain | ATTR_IDMAP, userns) < 0) {
        if (userns >= 0) s->has_idmap = 0;
        if (sys_set_attributes(fd, "", flags, plain, -1) < 0) { close(fd); return -1; }
    }
    int done = sys_move_mount(fd, "", AT_FDCWD, full);
    close(fd);
    return done;
}

/* Into /dev, which every box shows: CRIU restores only what runs from a file of the box, and the nursery runs from this one. */
static int copy_self(void) {
    char at[PATH_MAX];
    snprintf(at, sizeof at, "%s%s", stage, NURSERY_PROGRAM);
    int from = open("/proc/self/exe", O_RDONLY | O_CLOEXEC), to = open(at, O_WRONLY | O_CREAT | O_CLOEXEC, 0555);
    ssize_t n = from < 0 || to < 0 ? -1 : 1;
    while (n > 0) n = sendfile(to, from, NULL, 1 << 30);
    close(from);
    close(to);
    own(at, 0);
    return (int)n;
}

static int fill_dev(const char **step) {
    static const char *const devices[] = {"null", "zero", "full", "random", "urandom", "tty"};
    static const char *const links[][2] = {{"/proc/self/fd", "fd"}, {"/proc/self/fd/0", "stdin"}, {"/proc/self/fd/1", "stdout"},
                                           {"/proc/self/fd/2", "stderr"}, {"pts/ptmx", "ptmx"}};
    char at[PATH_MAX], from[64];
    *step = "mount a tmpfs on /dev";
    snprintf(at, sizeof at, "%s/dev", stage);
    if (mount("tmpfs", at, "tmpfs", MS_NOSUID, "mode=755,size=8m,nr_inodes=64") < 0) return -1;
    own(at, 0);
    for (size_t i = 0; i < sizeof devices / sizeof *devices; i++) {
        snprintf(from, sizeof from, "/dev/%s", devices[i]);
        snprintf(at, sizeof at, "%s/dev/%s", stage, devices[i]);
        *step = devices[i];
        int fd = open(at, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
        if (fd < 0) return -1;
        close(fd);
        if (mount(from, at, NULL, MS_BIND, NULL) < 0) return -1;
    }
    *step = "copy this program";
    if (copy_self() < 0) return -1;
    for (size_t i = 0; i < sizeof links / sizeof *links; i++) {
        snprintf(at, sizeof at, "%s/dev/%s", stage, links[i][1]);
        if (symlink(links[i][0], at) < 0) return -1;
        own(at, 0);
    }
    for (size_t i = 0; i < 2; i++) {
        snprintf(at, sizeof at, "%s/dev/%s", stage, i ? "pts" : "shm");
        if (mkdir(at, 0755) < 0) return -1;
        own(at, 0);
    }
    snprintf(at, sizeof at, "%s/dev", stage);
    return mount(NULL, at, NULL, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID, NULL);
}

static int fill(struct settings *s, struct cursor *plan, int userns, const char **step) {
    static const char *const folders[] = {"/dev", "/etc", "/home", "/mnt", "/proc", "/run", "/tmp", "/var/empty", "/var/lib", "/var/log", "/var/tmp"};
    char at[PATH_MAX];
    *step = "make the folders of the template";
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++) if (make_folders(folders[i], 0) < 0) return -1;
    snprintf(at, sizeof at, "%s/tmp", stage); chmod(at, 01777);
    snprintf(at, sizeof at, "%s/var/tmp", stage); chmod(at, 01777);
    for (int n = get_u16(plan); n--;) {
        char *path = get_string(plan);
        if (!path) break;
        *step = path;
        if (make_folders(path, 0) < 0 || bind_folder(s, userns, path, path) < 0) return -1;
        if (s->num_grafts == MAX_GRAFTS - 1) { errno = E2BIG; return -1; }
        s->grafts[s->num_grafts++] = strdup(path);
    }
    for (int n = get_u16(plan); n--;) {
        char *path = get_string(plan), *target = get_string(plan);
        if (!path || !target) break;
        *step = path;
        snprintf(at, sizeof at, "%s%s", stage, path);
        if (make_folders(path, 1) < 0 || symlink(target, at) < 0) return -1;
        own(at, 0);
    }
    for (int n = get_u16(plan); n--;) {
        char *path = get_string(plan);
        if (!path) break;
        *step = path;
        snprintf(at, sizeof at, "%s/var/empty", stage);
        if (bind_folder(s, -1, at, path) < 0) return -1;
    }
    for (int n = get_u16(plan); n--;) {
        char *path = get_string(plan);
        uint32_t mode = get_u32(plan), id = get_u32(plan), size;
        const uint8_t *data = get_text(plan, &size);
        if (!path) break;
        *step = path;
        if (put_file(path, mode, id, data, size) < 0) return -1;
    }
    for (int n = get_u16(plan); n--;) {
        char *path = get_string(plan);
        uint32_t mode = get_u32(plan), id = get_u32(plan);
        if (!path) break;
        *step = path;
        if (make_folders(path, 0) < 0) return -1;
        snprintf(at, sizeof at, "%s%s", stage, path);
        if (chmod(at, mode) < 0) return -1;
        own(at, id);
    }
    *step = "read the plan";
    if (plan->bad) { errno = EINVAL; return -1; }
    return fill_dev(step);
}

int enter_template(struct settings *s, struct cursor *plan, const char **step) {
    chowns = !s->is_rootless;
    stage = s->stage;
    root_id = s->id_base;
    s->has_idmap = 0;
    int userns = -1;
    if (s->num_ids > 1) { s->has_idmap = 1; userns = make_userns(s, 0, 0); }
    *step = "make the mounts private";
    if (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0) return -1;
    *step = "mount a tmpfs for the template";
    if (mount("tmpfs", stage, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=16m,nr_inodes=16384") < 0) return -1;
    own(stage, 0);
    if (fill(s, plan, userns, step) < 0) return -1;
    if (userns >= 0) close(userns);
    s->grafts[s->num_grafts++] = strdup("/dev");
    *step = "show /proc while the template is built";
    char at[32];
    snprintf(at, sizeof at, "%s/proc", stage);
    /* Without rights on the host a new /proc may be mounted only where one is in sight. */
    if (s->is_rootless && mount("/proc", at, NULL, MS_BIND | MS_REC, NULL) < 0) return -1;
    *step = "enter the template";
    if (chdir(stage) < 0 || sys_pivot_root(".", ".") < 0 || umount2(".", MNT_DETACH) < 0 || chdir("/") < 0) return -1;
    if (mount(NULL, "/", NULL, MS_REMOUNT | MS_BIND | MS_RDONLY | MS_NOSUID | MS_NODEV, NULL) < 0) return -1;
    *step = "take the template as a layer";
    s->template_fd = sys_open_tree(AT_FDCWD, "/", TREE_CLONE);
    return s->template_fd < 0 ? -1 : 0;
}
