#compdef @NAME@
# completion of @NAME@ for zsh
_@IDENT@() {
  local -a commands
  commands=(
@DESCRIBED@
  )
  if (( CURRENT == 2 )); then _describe command commands; return; fi
  case "$words[2]" in
@CASES@
  esac
}
if [ "$funcstack[1]" = "_@IDENT@" ]; then _@IDENT@ "$@"; else compdef _@IDENT@ @NAME@; fi
