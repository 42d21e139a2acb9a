#include "moestream/reader.h"

namespace moestream {

std::unique_ptr<Reader> make_reader(std::string_view text, const ReaderOptions& options) {
    try {
        if (text.ends_with(':')) throw Error(ErrorKind::usage, "'" + std::string(text) + "' lacks its argument");
        std::string argument;
        const auto& factory = Registry<ReaderFactory>::instance().find(text, argument);
        return factory(options, argument);
    } catch (const Error& error) {
        throw Error(error.kind, std::string("reader: ") + error.what());
    }
}

}  // namespace moestream
