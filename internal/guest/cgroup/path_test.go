// SPDX-License-Identifier: Apache-2.0

package cgroup

import (
	"maps"
	"slices"
	"strings"
	"testing"
)

func TestAncestors(t *testing.T) {
	for path, want := range map[string][]string{
		"": nil, "/": nil, "/a": {"/a"}, "/a/b/c": {"/a/b/c", "/a/b", "/a"}, "a/b": {"a/b", "a"},
	} {
		if got := slices.Collect(Ancestors(path)); !slices.Equal(got, want) {
			t.Errorf("Ancestors(%q) = %q, want %q", path, got, want)
		}
	}
}

func TestContainerID(t *testing.T) {
	id := strings.Repeat("0a", 32)
	for path, want := range map[string]string{
		"/docker/" + id:                                           id,
		"/system.slice/docker-" + id + ".scope":                   id,
		"/kubepods.slice/x.slice/cri-containerd-" + id + ".scope": id,
		"/x/system.slice:docker:" + id:                            id,
		"/docker/" + id + "/init.scope":                           "",
		"/docker/web":                                             "",
		"/docker/" + strings.ToUpper(id):                          "",
		"/docker/" + id[1:]:                                       "",
		"/docker/" + id + "0":                                     "",
		"":                                                        "",
	} {
		if got := ContainerID(path); got != want {
			t.Errorf("ContainerID(%q) = %q, want %q", path, got, want)
		}
	}
}

func TestParsePaths(t *testing.T) {
	for _, c := range []struct {
		text string
		want []string
		v1   bool
	}{
		{"0::/\n", nil, false},
		{"0::/a/b\n", []string{"/a/b"}, false},
		{"0::/a (deleted)\n", []string{"/a"}, false},
		{"5:cpu,cpuacct:/x\n4:pids:/\n3:name=systemd:/y\n1:net_cls:/x\n0::/a\n", []string{"/a", "/x"}, true},
		{"1:pids:/a:b\n", []string{"/a:b"}, true},
		{"1:name=systemd:/docker/x\n0::/a\n", []string{"/a"}, false}, // a user may make that
		{"0::/../../docker/x\n5:cpu:/..\n", nil, false},              // outside of our view
		{"garbage\n\n:\n0::relative", nil, false},
		{"", nil, false},
	} {
		if got, v1 := parsePaths(c.text); !slices.Equal(got, c.want) || v1 != c.v1 {
			t.Errorf("parsePaths(%q) = %q, %v, want %q, %v", c.text, got, v1, c.want, c.v1)
		}
	}
}

func TestMounts(t *testing.T) {
	const mountinfo = `25 30 0:23 / /sys/fs/cgroup ro,nosuid shared:9 - tmpfs tmpfs ro,mode=755
26 25 0:24 / /sys/fs/cgroup/unified rw,relatime shared:10 - cgroup2 cgroup2 rw,nsdelegate
27 25 0:25 / /sys/fs/cgroup/systemd rw,relatime shared:11 master:3 - cgroup cgroup rw,name=systemd
28 30 0:24 /user.slice /mnt/a\040part rw - cgroup2 none rw
29 30 0:99 / /mnt/cgroup2 rw - tmpfs cgroup2 rw
nonsense
`
	whole, parts, err := Mounts(strings.NewReader(mountinfo))
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(whole, []string{"/sys/fs/cgroup/unified"}) || !slices.Equal(parts, []string{"/mnt/a part"}) {
		t.Errorf("got %q and %q", whole, parts)
	}
	mounts, err := parseMounts(strings.NewReader(mountinfo + "40 25 0:40 / /cpu rw - cgroup cgroup rw,cpu,cpuacct\n41 25 0:41 / /pids rw - cgroup cgroup rw,xattr,pids\n"))
	if err != nil {
		t.Fatal(err)
	}
	numbers := make(map[string]uint32)
	for _, m := range mounts {
		if n, ok := m.number("12:pids:/\n5:cpu,cpuacct:/x\n4:memory:/\n1:name=systemd:/\nx:y\n0::/\n"); ok {
			numbers[m.path] = n
		}
	}
	if want := map[string]uint32{"/sys/fs/cgroup/unified": 0, "/mnt/a part": 0, "/cpu": 5, "/pids": 12}; !maps.Equal(numbers, want) {
		t.Errorf("numbers %v, want %v", numbers, want)
	}
	if v1, err := MountsV1(strings.NewReader(mountinfo)); err != nil || !slices.Equal(v1, []string{"/sys/fs/cgroup/systemd"}) {
		t.Errorf("MountsV1 = %q, %v", v1, err)
	}
}

func FuzzParsePaths(f *testing.F) {
	f.Add("5:cpu,cpuacct:/x\n0::/a (deleted)\n")
	f.Fuzz(func(t *testing.T, text string) {
		paths, _ := parsePaths(text)
		for _, p := range paths {
			for a := range Ancestors(p) {
				_ = ContainerID(a)
			}
			if p == "/" || strings.Contains(p+"/", "/../") {
				t.Errorf("%q names no cgroup here", p)
			}
		}
	})
}
