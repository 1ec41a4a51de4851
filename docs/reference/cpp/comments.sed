# Makes Doxygen's comments of those in the headers. A comment on lines of its own belongs to what follows, one behind code
# to what stands before it, and the first one to the file. What is indented in a comment is code.
/^ *\/\/ SPDX/d
/^ *\/\/ ----/d
s,^#pragma once$,/// @file,
s,^( *)//( |$),\1///\2,
s,^( *)///(  +),\1///    \2,
s,^(.*[;{\,)].*)  // ,\1  ///< ,
