#include "moestream/reader.h"

#include <charconv>

namespace moestream {

static constexpr uint32_t kMostPieces = 8;

std::unique_ptr<Reader> make_reader(std::string_view text, const ReaderOptions& options) {
    try {
        if (text.ends_with(':')) throw Error(ErrorKind::usage, "'" + std::string(text) + "' lacks its argument");
        std::string argument;
        const auto& factory = Registry<ReaderFactory>::instance().find(text, argument);
        ReaderOptions cut = options;
        const auto times = argument.find('x');
        if (times != std::string::npos) {
            const char* last = argument.data() + argument.size();
            const auto [end, error] = std::from_chars(argument.data() + times + 1, last, cut.pieces);
            if (times == 0 || error != std::errc() || end != last || cut.pieces < 1 || cut.pieces > kMostPieces) {
                throw Error(ErrorKind::usage, "a read is cut into 1 to " + std::to_string(kMostPieces) +
                                                  " pieces, as in uring:8x4, not '" + argument + "'");
            }
            argument.resize(times);
        }
        return factory(cut, argument);
    } catch (const Error& error) {
        throw Error(error.kind, std::string("reader: ") + error.what());
    }
}

}  // namespace moestream
