# How Gradwire's own targets are made: one library a folder, explicit sources, warnings on.

add_library(gradwire_options INTERFACE)
target_compile_options(gradwire_options INTERFACE
  -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wnon-virtual-dtor -Wold-style-cast)
if(GRADWIRE_WERROR)
  target_compile_options(gradwire_options INTERFACE -Werror)
endif()
if(GRADWIRE_SANITIZE)
  # Everything in the tree is built with the sanitizers, libraries from Debian are not.
  add_compile_options(-fsanitize=${GRADWIRE_SANITIZE} -fno-omit-frame-pointer -g)
  add_link_options(-fsanitize=${GRADWIRE_SANITIZE})
  if(GRADWIRE_SANITIZE MATCHES undefined)
    add_compile_options(-fno-sanitize-recover=undefined)
  endif()
endif()
if(GRADWIRE_FUZZ)
  # What libFuzzer is guided by; it itself is linked to the fuzz programs alone.
  add_compile_options(-fsanitize=fuzzer-no-link)
  add_link_options(-fsanitize=fuzzer-no-link)
endif()

# gradwire_library(<name> SOURCES ... HEADERS ... PUBLIC <targets> PRIVATE <targets>)
# makes the static library gradwire_<name> with the alias gradwire::<name>.
function(gradwire_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;HEADERS;PUBLIC;PRIVATE" ${ARGN})
  add_library(gradwire_${name} STATIC ${ARG_SOURCES} ${ARG_HEADERS})
  add_library(gradwire::${name} ALIAS gradwire_${name})
  target_include_directories(gradwire_${name} PUBLIC ${PROJECT_SOURCE_DIR})
  target_link_libraries(gradwire_${name}
    PUBLIC ${ARG_PUBLIC}
    PRIVATE $<BUILD_INTERFACE:gradwire_options> ${ARG_PRIVATE})
endfunction()

# gradwire_executable(<name> SOURCES ... LINK <targets>)
function(gradwire_executable name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LINK" ${ARGN})
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE gradwire_options ${ARG_LINK})
endfunction()
