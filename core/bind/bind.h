#pragma once
#include <nanobind/nanobind.h>

void bind_errors(nanobind::module_& m);
void bind_cache(nanobind::module_& m);
void bind_engine(nanobind::module_& m);
void bind_replay(nanobind::module_& m);
