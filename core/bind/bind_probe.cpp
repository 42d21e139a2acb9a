// Timed reads and copies for `moestream probe`, and what of a file is in the page cache; the interpreter is released
// meanwhile.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <unistd.h>

#include <cerrno>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "bind.h"
#include "moestream/direct.h"
#include "moestream/page_cache.h"
#include "moestream/probe.h"

namespace nb = nanobind;
using namespace moestream;

namespace {

using Row = std::tuple<uint32_t, uint64_t, uint32_t>;  // file, offset, bytes

std::vector<ProbeRange> to_ranges(const std::vector<Row>& rows) {
    std::vector<ProbeRange> ranges;
    for (const auto& [file, offset, bytes] : rows) ranges.push_back({file, offset, bytes});
    return ranges;
}

nb::dict describe(const ProbeTiming& timing) {
    nb::dict out;
    out["bytes"] = timing.bytes;
    out["reads"] = timing.reads;
    out["seconds"] = timing.seconds;
    out["cpu_s"] = timing.cpu_seconds;
    return out;
}

template <class Function>
nb::dict measured(Function&& function) {
    ProbeTiming timing;
    {
        nb::gil_scoped_release released;
        timing = function();
    }
    return describe(timing);
}

nb::dict reads(std::vector<std::string> files, const std::vector<Row>& ranges, std::string reader, uint32_t in_flight,
               uint64_t split_bytes, bool direct, uint64_t alignment, bool huge, uint64_t buffer_bytes, double seconds) {
    const ProbeReads options{std::move(files), std::move(reader), in_flight,    split_bytes, direct,
                             alignment,        huge,              buffer_bytes, seconds};
    const auto wanted = to_ranges(ranges);
    return measured([&] { return probe_reads(options, wanted); });
}

nb::dict mapping(std::vector<std::string> files, const std::vector<Row>& ranges, std::string warmer, std::string advice,
                 uint32_t route, bool touch, double seconds) {
    const ProbeMapping options{std::move(files), std::move(warmer), std::move(advice), route, touch, seconds};
    const auto wanted = to_ranges(ranges);
    return measured([&] { return probe_mapping(options, wanted); });
}

nb::dict copies(uint32_t threads, uint64_t bytes, double seconds) {
    return measured([&] { return probe_copies(threads, bytes, seconds); });
}

std::pair<uint32_t, std::string> direct_reads(const nb::bytes& name) {
    const std::string path(name.c_str(), name.size());
    const nb::gil_scoped_release released;
    const DirectReads found = open_direct(path);
    if (found.fd >= 0) close(found.fd);
    return {found.alignment, found.refusal};
}

// What `count` finds, or, where it returns an errno, that as an OSError.
template <class Count>
uint64_t counted(Count&& count) {
    uint64_t bytes = 0;
    int error = 0;
    {
        const nb::gil_scoped_release released;
        error = count(bytes);
    }
    if (error == 0) return bytes;
    errno = error;
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
}

uint64_t cached_bytes(int descriptor) {
    return counted([&](uint64_t& bytes) { return count_cached_bytes(descriptor, bytes); });
}

uint64_t resident_bytes(int descriptor, const std::vector<std::pair<uint64_t, uint64_t>>& ranges) {
    return counted([&](uint64_t& bytes) { return count_resident_bytes(descriptor, ranges, bytes); });
}

}  // namespace

void bind_probe(nb::module_& m) {
    m.def("probe_reads", &reads, nb::arg("files"), nb::arg("ranges"), nb::kw_only(), nb::arg("reader"), nb::arg("in_flight"),
          nb::arg("split_bytes") = 0, nb::arg("direct") = true, nb::arg("alignment") = 4096, nb::arg("huge") = false,
          nb::arg("buffer_bytes"), nb::arg("seconds"),
          "Timed reads of (file, offset, bytes) ranges by a reader: bytes, reads, seconds and the process's CPU seconds.");
    m.def("probe_mapping", &mapping, nb::arg("files"), nb::arg("ranges"), nb::kw_only(), nb::arg("warmer"),
          nb::arg("advice") = "normal", nb::arg("route") = 8, nb::arg("touch") = true, nb::arg("seconds"),
          "The same of ranges of mapped files, asked for by a warmer and then touched.");
    m.def("probe_copies", &copies, nb::arg("threads"), nb::arg("bytes"), nb::arg("seconds"),
          "The same of copies within memory.");
    m.def("direct_reads", &direct_reads, nb::arg("path"),
          "What O_DIRECT reads of a file must be multiples of, and ''; or 0 and why there are none.");
    m.def("cached_bytes", &cached_bytes, nb::arg("descriptor"),
          "Bytes of an open file in the page cache, by cachestat. Raises OSError.");
    m.def("resident_bytes", &resident_bytes, nb::arg("descriptor"), nb::arg("ranges"),
          "The same of the pages of (offset, bytes) ranges, by mincore. Raises OSError.");
}
