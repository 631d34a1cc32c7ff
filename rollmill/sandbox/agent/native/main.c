/* One binary: the zygote of the namespace backend, the first process of a virtual machine, an agent on stdin and stdout; and two small
 * ones that live forks need. */
#include "box.h"
#include <stdio.h>
#include <string.h>
#include <unistd.h>

extern char **environ;

/* `serve [--contained] [WORKDIR]`: in a container whose processes are all the box's. */
int stdio_main(int argc, char **argv) {
    struct box box = {.workdir = "/", .env = environ, .upper_fd = -1, .layer_fd = -1};
    for (int i = 2; i < argc; i++) {
        if (!strcmp(argv[i], "--contained")) box.is_contained = 1;
        else box.workdir = argv[i];
    }
    if (chdir(box.workdir) < 0) { perror(box.workdir); return 1; }
    uint32_t hello[6] = {12, 0, SAY_HELLO, PROTOCOL, 0, FACT_PROC};
    if (write(1, hello, sizeof hello) != sizeof hello) return 1;
    return serve(0, 1, &box);
}

int main(int argc, char **argv) {
    if (getpid() == 1 && argc == 1) return guest_main();
    if (argc > 1 && !strcmp(argv[1], "serve")) return stdio_main(argc, argv);
    if (argc > 1 && !strcmp(argv[1], "guest")) return guest_main();
    if (argc > 1 && !strcmp(argv[1], "source")) { puts(SOURCE_DIGEST); return 0; }
    if (argc > 1 && !strcmp(argv[1], "zygote")) return zygote_main(argc, argv);
    if (argc > 1 && !strcmp(argv[1], "nursery")) return nursery_main(argc, argv);
    if (argc > 1 && !strcmp(argv[1], "join")) return join_main(argc, argv);
    fputs("usage: rollmill-box serve [--contained] [WORKDIR] | zygote FD | guest | source\n", stderr);
    return 2;
}
