// The core as a Python module: a table of contents, one bind_*.cpp a subject.
#include <nanobind/nanobind.h>

#include "bind.h"

// CMake's digest of all sources; moestream/core.py compares it.
NB_MODULE(_core, m) {
    m.doc() = "moestream's core: stores, readers, policies and the hook that llama.cpp calls.";
    // An exception that keeps an engine alive until exit is no leak worth a page of warnings.
    nanobind::set_leak_warnings(false);
    m.attr("SOURCES") = MOESTREAM_SOURCES;
    bind_errors(m);
    bind_cache(m);
    bind_engine(m);
    bind_guards(m);
    bind_replay(m);
    bind_probe(m);
}
