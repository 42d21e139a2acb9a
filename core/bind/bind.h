#pragma once
#include <nanobind/nanobind.h>

#include "moestream/cache.h"

void bind_errors(nanobind::module_& m);
void bind_cache(nanobind::module_& m);
void bind_engine(nanobind::module_& m);
void bind_guards(nanobind::module_& m);
void bind_replay(nanobind::module_& m);
void bind_probe(nanobind::module_& m);

nanobind::dict to_dict(const moestream::CacheCounters& counters);
