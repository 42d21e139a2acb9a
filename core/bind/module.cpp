// The core as a Python module: a table of contents, one bind_*.cpp a subject.
#include <nanobind/nanobind.h>

#include "bind.h"

NB_MODULE(_core, m) {
    m.doc() = "moestream's core: stores, readers, policies and the hook that llama.cpp calls.";
    bind_errors(m);
    bind_cache(m);
    bind_engine(m);
}
