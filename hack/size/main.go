// SPDX-License-Identifier: Apache-2.0

// Command size prints how large the project is at a commit, by the doors of internal/, and how
// far its features are woven into rooms of others:
//
//	go run ./hack/size [REV]
//
// Packages of commits before there were doors are shown where they are now.
//
// A line of Go counts whatever is on it. Generated code does not count. What is woven of a
// feature are the lines outside its room that name it, and all lines of files outside that are
// named after it.
package main

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// feature is an ability with a room of its own.
type feature struct {
	name string
	room *regexp.Regexp // of paths
	word string         // an extended regular expression for lines and names of files, in any case
}

var features = []feature{
	{"names", regexp.MustCompile(`^internal/([a-z]+/)*(names|route)/`), `internal/([a-z]+/)*names"|\bnames\.|NamesAt|[a-z]Names\b|alias`},
	{"expose", regexp.MustCompile(`/expose[a-z_]*\.go$`), `expose`},
	{"onConflict", regexp.MustCompile(`/moved[a-z_]*\.go$`), `on-?conflict`},
	{"publish", regexp.MustCompile(`^(internal/(([a-z]+/)*publish|config/policy)/|cmd/fairlead-publish/)`), `internal/(([a-z]+/)*publish(/[a-z]+)?|config/policy)"|\bpublish\.|publishAllow|SourcePublish|lease`},
	{"inventory", regexp.MustCompile(`^internal/([a-z]+/)*inventory/`), `inventor(y|ies)`},
}

// moved are the packages that were at the first level of internal/ before there were doors, by door.
var moved = map[string]string{
	"config": "forwards loglevel memory privilege publish/policy rules trust words yamltree",
	"guest":  "agent cgroup diagnose/gather kernel netwatch observer peer publish reconcile registry run sink source wsl",
	"host":   "hostpeer names/route",
	"link":   "conns forward hvsock own replica trace wire",
	"port":   "claims compact names procnet schedule table",
	"setup":  "agentinstall demo dropin hostinstall pair",
	"status": "diagnose/doctor diagnose/explain inventory metrics version",
}

// place returns where a folder is now: "internal/sink/peer" is "internal/guest/sink/peer".
func place(dir string) string {
	rest, ok := strings.CutPrefix(dir, "internal/")
	if !ok {
		return dir
	}
	to, long := rest, ""
	for door, rooms := range moved {
		for _, room := range strings.Fields(rooms) {
			if below, ok := strings.CutPrefix(rest+"/", room+"/"); ok && len(room) > len(long) {
				to, long = path.Join(door, path.Base(room), below), room
			}
		}
	}
	return "internal/" + to
}

// door returns the first two parts of a folder's path.
func door(dir string) string {
	parts := strings.SplitN(dir, "/", 3)
	return strings.Join(parts[:min(len(parts), 2)], "/")
}

var generated = regexp.MustCompile(`_(bpfel|x86_bpfel|arm64_bpfel)\.go$`)

func main() {
	rev := "HEAD"
	if len(os.Args) == 2 {
		rev = os.Args[1]
	}
	if err := run(rev); err != nil {
		fmt.Fprintln(os.Stderr, "size:", err)
		os.Exit(1)
	}
}

func run(rev string) error {
	lines, err := count(rev, "", "*.go")
	if err != nil {
		return err
	}
	type sum struct{ code, tests int }
	packages, doors := make(map[string]sum), make(map[string]sum)
	var code, unit, outside int
	for file, n := range lines {
		dir, isTest := place(path.Dir(file)), strings.HasSuffix(file, "_test.go")
		switch p := packages[dir]; {
		case generated.MatchString(file):
		case strings.HasPrefix(file, "test/"), strings.HasPrefix(file, "internal/testkit/"):
			outside += n
		case !strings.HasPrefix(file, "cmd/") && !strings.HasPrefix(file, "internal/"):
		case isTest:
			unit += n
			packages[dir] = sum{p.code, p.tests + n}
		default:
			code += n
			packages[dir] = sum{p.code + n, p.tests}
		}
	}
	for dir, p := range packages {
		d := doors[door(dir)]
		doors[door(dir)] = sum{d.code + p.code, d.tests + p.tests}
	}
	fmt.Printf("%7s %7s  door, package\n", "lines", "tests")
	for _, in := range slices.Sorted(maps.Keys(doors)) {
		fmt.Printf("%7d %7d  %s\n", doors[in].code, doors[in].tests, in)
		for _, dir := range slices.Sorted(maps.Keys(packages)) {
			if p := packages[dir]; door(dir) == in && p != doors[in] {
				fmt.Printf("%7d %7d    %s\n", p.code, p.tests, dir)
			}
		}
	}
	words, changelog, err := documents(rev)
	if err != nil {
		return err
	}
	direct, err := requirements(rev)
	if err != nil {
		return err
	}
	fmt.Printf("\nproduct %d, unit tests %d, test/ and kit %d lines; direct requirements %d; docs %d words, CHANGELOG %d\n\n",
		code, unit, outside, direct, words, changelog)
	return weave(rev, lines)
}

// weave prints the lines outside the room of each feature for one inside.
func weave(rev string, lines map[string]int) error {
	fmt.Printf("%7s %7s %7s  woven: feature\n", "inside", "outside", "ratio")
	var in, out int
	for _, f := range features {
		named, err := count(rev, f.word, "cmd/*.go", "internal/*.go")
		if err != nil {
			return err
		}
		base := regexp.MustCompile("(?i)" + f.name)
		inside, outside := 0, 0
		for file, n := range lines {
			switch {
			case strings.HasSuffix(file, "_test.go"), generated.MatchString(file), !strings.HasPrefix(file, "cmd/") && !strings.HasPrefix(file, "internal/"):
			case f.room.MatchString(file):
				inside += n
			case base.MatchString(path.Base(file)):
				outside += n
			default:
				outside += named[file]
			}
		}
		in, out = in+inside, out+outside
		fmt.Printf("%7d %7d %7.2f  %s\n", inside, outside, float64(outside)/float64(max(1, inside)), f.name)
	}
	fmt.Printf("%7d %7d %7.2f  all\n", in, out, float64(out)/float64(max(1, in)))
	return nil
}

// count returns how many lines of each file match a pattern.
func count(rev, pattern string, paths ...string) (map[string]int, error) {
	text, err := git(append([]string{"grep", "-ciE", "-e", pattern, rev, "--"}, paths...)...)
	if err != nil {
		return nil, err
	}
	found := make(map[string]int)
	for line := range strings.Lines(text) {
		if parts := strings.Split(strings.TrimSpace(strings.TrimPrefix(line, rev+":")), ":"); len(parts) == 2 {
			if found[parts[0]], err = strconv.Atoi(parts[1]); err != nil {
				return nil, err
			}
		}
	}
	return found, nil
}

// documents returns the words of all documents but the licences, and those of the CHANGELOG.
func documents(rev string) (words, changelog int, err error) {
	files, err := git("ls-tree", "-r", "--name-only", rev)
	if err != nil {
		return 0, 0, err
	}
	for _, file := range strings.Fields(files) {
		if path.Ext(file) != ".md" || strings.HasPrefix(file, "LICENSES/") {
			continue
		}
		text, err := git("show", rev+":"+file)
		if err != nil {
			return 0, 0, err
		}
		if n := len(strings.Fields(text)); file == "CHANGELOG.md" {
			changelog = n
		} else {
			words += n
		}
	}
	return words, changelog, nil
}

// requirements returns how many modules go.mod requires directly.
func requirements(rev string) (n int, err error) {
	text, err := git("show", rev+":go.mod")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(text) {
		if strings.HasPrefix(line, "\t") && strings.Contains(line, " v") && !strings.Contains(line, "// indirect") {
			n++
		}
	}
	return n, nil
}

func git(args ...string) (string, error) {
	var problem bytes.Buffer
	c := exec.Command("git", args...)
	c.Stderr = &problem
	out, err := c.Output()
	if err != nil {
		return "", fmt.Errorf("git %s: %w: %s", args[0], err, bytes.TrimSpace(problem.Bytes()))
	}
	return string(out), nil
}
