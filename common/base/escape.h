#pragma once

#include <string>
#include <string_view>

namespace gradwire {

/// Appends the text so that it stays on one line: control characters as \n, \t or \u001b, what is
/// no UTF-8 as the replacement character. With `for_json` also as it stands inside of JSON's
/// quotes.
void AppendEscaped(std::string_view text, bool for_json, std::string& out);

/// "..." as JSON has it, whatever bytes the text holds.
std::string QuoteJson(std::string_view text);

}  // namespace gradwire
