# completion of @NAME@ for bash
_@IDENT@() {
  local word="${COMP_WORDS[COMP_CWORD]}" command="${COMP_WORDS[1]}" words=""
  if [ "$COMP_CWORD" -eq 1 ]; then words="@COMMANDS@"; else
    case "$command" in
@CASES@
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
  [ "${#COMPREPLY[@]}" -gt 0 ] || COMPREPLY=($(compgen -o default -- "$word"))
}
complete -F _@IDENT@ @NAME@
