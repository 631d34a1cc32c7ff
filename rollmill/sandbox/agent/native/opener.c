/* Turns folders of the host into layers: a process that stayed where the host's paths can be seen, with the rights to clone mounts. */
#include "cage.h"
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

/* A request is a path; the answer an errno and its words, with the layer as a descriptor when it is 0. */
void open_layers(const struct settings *s, int fd) {
    uint8_t path[4097];
    int fds[MAX_FDS];
    size_t size, num_fds;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    int kept[] = {s->proc_fd, fd};
    if (kept[0] > kept[1]) { kept[0] = fd; kept[1] = s->proc_fd; }
    keep_only(kept, 2);
    int userns = s->num_ids > 1 ? make_userns(s) : -1;
    while (receive(fd, path, sizeof path - 1, &size, fds, &num_fds) > 0) {
        path[size] = 0;
        for (size_t i = 0; i < num_fds; i++) close(fds[i]);
        uint64_t plain = ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV;
        int layer = sys_open_tree(AT_FDCWD, (char *)path, TREE_CLONE), number = 0;
        if (layer < 0) number = errno;
        else if ((userns < 0 || sys_set_attributes(layer, "", TREE_EMPTY, plain | ATTR_IDMAP, userns) < 0) &&
                 sys_set_attributes(layer, "", TREE_EMPTY, plain, -1) < 0) number = errno;
        uint32_t answer = (uint32_t)number;
        int failed = send_with(fd, &answer, 4, &layer, number ? 0 : 1);
        if (layer >= 0) close(layer);
        if (failed < 0) break;
    }
    _exit(0);
}
