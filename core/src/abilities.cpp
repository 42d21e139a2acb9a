#include "moestream/abilities.h"

#include <fcntl.h>
#include <unistd.h>

#include "moestream/error.h"
#include "readers/ring.h"
#include "stores/pages.h"
#include "warmers/residency.h"

namespace moestream {
namespace {

std::string ring_refused() {
    try {
        const Ring ring(1);
        return "";
    } catch (const Error& error) {
        return error.what();
    }
}

std::string counting_refused() {
    const std::string own = "/proc/self/exe";
    const int fd = open(own.c_str(), O_RDONLY | O_CLOEXEC);
    const std::string why = cachestat_refused(own, fd);
    if (fd >= 0) close(fd);
    return why;
}

}  // namespace

std::map<std::string, std::string> abilities() {
    return {{"io_uring", ring_refused()},
            {"cachestat", counting_refused()},
            {"mincore", mincore_refused()},
            {"mremap", move_refused()},
            {"populate", populate_refused()}};
}

}  // namespace moestream
