// SPDX-License-Identifier: Apache-2.0

//go:build linux

package agentinstall

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/fairlead/fairlead/deploy"
)

// boot makes WSL start the agent with the distribution.
func (o Options) boot() error {
	command, err := o.command()
	if err != nil {
		return err
	}
	text, err := o.read(wslFile)
	if err != nil {
		return err
	}
	rest, _, err := withoutCommand(text)
	if err != nil {
		return err
	}
	if text, err = withCommand(rest, command); err != nil {
		return err
	}
	return o.write(wslFile, text, 0o644)
}

// unboot undoes boot in a wsl.conf with this text, and ends the agent that runs by it.
func (o Options) unboot(ctx context.Context, text string) (r Removed, err error) {
	r.Found = true
	rest, command, err := withoutCommand(text)
	if err != nil {
		return r, err
	}
	if rest == "" {
		err = os.Remove(o.path(wslFile))
	} else {
		err = o.write(wslFile, rest, 0o644)
	}
	if err != nil || o.Control == nil {
		return r, err
	}
	program, flags := started(command)
	programs := []string{o.Program}
	if program != "" && program != o.Program {
		programs = append(programs, program)
	}
	r.Ended, r.Runs = endAgent(ctx, o.Control(flags), programs)
	if r.Runs != nil {
		r.Ended = 0
	}
	return r, ctx.Err()
}

// started returns the program that a line of wsl.conf starts, and its flags after "agent".
func started(command string) (program string, flags []string) {
	words, _ := parts(command)
	if len(words) == 0 {
		return "", nil
	}
	return words[0], words[min(2, len(words)):]
}

// parts returns the words of a line's command, and what the shell is to do with them.
func parts(line string) (words []string, shell string) {
	_, value, _ := strings.Cut(line, "=")
	words = strings.Fields(value)
	for i, w := range words {
		if strings.ContainsFunc(w, func(r rune) bool { return !plain(r) }) {
			return words[:i], strings.Join(words[i:], " ")
		}
	}
	return words, ""
}

// ours returns whether a line of wsl.conf is as command makes it, and nothing was added.
func ours(line string) bool {
	words, shell := parts(line)
	return len(words) > 1 && words[1] == "agent" && strings.HasSuffix(strings.TrimSpace(deploy.WSLConf), shell)
}

// command returns the line of wsl.conf.
func (o Options) command() (string, error) {
	words := append([]string{o.Program}, o.Args...)
	for _, w := range words {
		// How wsl.conf quotes is not documented.
		if strings.ContainsFunc(w, func(r rune) bool { return !plain(r) }) {
			return "", fmt.Errorf("%q cannot be in %s: use letters, digits and any of %q, or put the setting into agent.yaml", w, "/"+wslFile, plainMarks)
		}
	}
	for line := range strings.Lines(deploy.WSLConf) {
		if strings.HasPrefix(line, "command") {
			return strings.Replace(strings.TrimSpace(line), deploy.Program+" agent", strings.Join(words, " "), 1), nil
		}
	}
	return "", errors.New("the template of wsl.conf has no command")
}

// plainMarks mean nothing to a shell nor to wsl.conf.
const plainMarks = "_-+=:,./@%"

func plain(r rune) bool {
	return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune(plainMarks, r)
}

// withCommand adds the command to a wsl.conf, or returns an error if there is another.
func withCommand(text, command string) (string, error) {
	if text != "" && !strings.HasSuffix(text, "\n") {
		text += "\n"
	}
	lines := strings.SplitAfter(text, "\n")
	boot, section := -1, ""
	for i, line := range lines {
		line = strings.TrimSpace(line)
		if strings.HasPrefix(line, "[") {
			section = strings.ToLower(line)
			if section == "[boot]" && boot < 0 {
				boot = i
			}
		}
		if section == "[boot]" && isCommand(line) {
			_, value, _ := strings.Cut(line, "=")
			return "", fmt.Errorf("/%s has a boot command, %q: there can be one, so add to it: %s", wslFile, strings.TrimSpace(value), command)
		}
	}
	if boot < 0 {
		return text + marker + "\n[boot]\n" + command + "\n", nil
	}
	return strings.Join(slices.Insert(lines, boot+1, marker+"\n", command+"\n"), ""), nil
}

// withoutCommand removes what withCommand added, and returns the rest and the line of the
// command. If the command was edited away, it removes the marker alone. It is an error if
// something was added to the command.
func withoutCommand(text string) (rest, command string, err error) {
	lines := slices.Collect(strings.Lines(text))
	for i := 0; i < len(lines); {
		if strings.TrimSpace(lines[i]) != marker {
			i++
			continue
		}
		lines = slices.Delete(lines, i, i+1)
		boot := i < len(lines) && strings.EqualFold(strings.TrimSpace(lines[i]), "[boot]")
		first := i
		if boot {
			first++
		}
		at := agentCommand(lines, first)
		if at < 0 {
			continue
		}
		command = lines[at]
		if !ours(command) {
			_, value, _ := strings.Cut(command, "=")
			return "", "", fmt.Errorf("/%s has more than fairlead in its boot command, %q: edit it by hand, and remove the line %q", wslFile, strings.TrimSpace(value), marker)
		}
		lines = slices.Delete(lines, at, at+1)
		if boot && sectionEnds(lines[first:]) {
			lines = slices.Delete(lines, i, i+1)
		}
	}
	return strings.Join(lines, ""), command, nil
}

// agentCommand returns the index of the command that starts the agent, from first to the
// end of the section: settings may have been added above it. It is -1 if there is none.
func agentCommand(lines []string, first int) int {
	for i := first; i < len(lines) && !strings.HasPrefix(strings.TrimSpace(lines[i]), "["); i++ {
		words := strings.FieldsFunc(lines[i], func(r rune) bool { return !plain(r) }) // "agent;" as well
		if isCommand(lines[i]) && slices.Contains(words, "agent") {
			return i
		}
	}
	return -1
}

// isCommand returns whether a line of wsl.conf sets the boot command, if it is in [boot].
func isCommand(line string) bool {
	key, _, ok := strings.Cut(line, "=")
	return ok && strings.EqualFold(strings.TrimSpace(key), "command")
}

// sectionEnds returns whether only empty lines come before the next section or the end.
func sectionEnds(lines []string) bool {
	for _, line := range lines {
		if line = strings.TrimSpace(line); line != "" {
			return strings.HasPrefix(line, "[")
		}
	}
	return true
}
