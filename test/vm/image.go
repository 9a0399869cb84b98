// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
)

//go:embed init.sh
var initScript []byte

// systemScript is what init.sh continues with to boot a Debian from a disk.
//
//go:embed system.sh
var systemScript []byte

// tools go into the guest at the path they have here, with the libraries they load.
var tools = []string{
	"/usr/sbin/nft", "/usr/sbin/xtables-nft-multi", "/usr/sbin/xtables-legacy-multi",
	"/usr/sbin/ip", "/usr/bin/ss",
}

// modules go into the guest with all they depend on.
var modules = strings.Fields(`
	nf_tables nft_compat nft_chain_nat nft_nat nft_redir nft_masq nft_ct nft_fib_inet nft_fib_ipv4 nft_fib_ipv6 nft_numgen
	nft_counter nft_hash nft_limit nft_objref nft_reject_inet nft_reject_ipv4 nft_reject_ipv6 nf_conntrack_netlink nfnetlink
	ip_tables ip6_tables iptable_nat ip6table_nat iptable_filter ip6table_filter
	xt_nat xt_tcpudp xt_addrtype xt_comment xt_multiport xt_conntrack xt_mark xt_MASQUERADE
	xt_REDIRECT xt_statistic xt_recent xt_limit xt_set ip_set_hash_ipport
	bridge br_netfilter veth dummy tun overlay
	tcp_diag udp_diag inet_diag netlink_diag unix_diag
	vsock vsock_loopback vsock_diag vmw_vsock_virtio_transport vhost_vsock kvm_amd virtio_pci
	crc32c_generic crc32c_intel`)

// kernel is one that hack/provision.sh laid into the cache.
type kernel struct {
	version string // as asked for, for example "6.1", with the suffix of arch
	release string // as uname -r says it
	dir     string
	arch    architecture
}

func findKernel(cache, version string, arch architecture) (kernel, error) {
	k := kernel{version: version + arch.suffix, dir: filepath.Join(cache, "kernels", version+arch.suffix), arch: arch}
	release, err := os.ReadFile(filepath.Join(k.dir, "release"))
	if err != nil {
		return kernel{}, fmt.Errorf("kernel %s is not in the cache: run %s (%w)", k.version, provides(version, arch), err)
	}
	k.release = strings.TrimSpace(string(release))
	return k, nil
}

// provides returns the command that puts a kernel into the cache.
func provides(version string, arch architecture) string {
	switch {
	case version == "wsl":
		return "go run ./hack/stages kernel-wsl"
	case version == "5.10" || version == "sid":
		return "hack/provision.sh kernels"
	}
	return "hack/provision.sh " + arch.provision
}

// findSystem returns the file system of a Debian that boots name, which hack/provision.sh
// made.
func findSystem(cache, name string) (string, error) {
	image := filepath.Join(cache, "roots", name+".img")
	if _, err := os.Stat(image); err != nil {
		return "", fmt.Errorf("a Debian with %s is not in the cache: run hack/provision.sh boot (%w)", name, err)
	}
	return image, nil
}

// baseImage returns the path of the initramfs for k: busybox, tools and
// modules. It is made once for each content and kept in the cache.
func baseImage(ctx context.Context, cache string, k kernel) (string, error) {
	tree := k.arch.tree(cache)
	files, err := toolFiles(tree, k.arch)
	if err != nil {
		return "", err
	}
	key := sha256.New()
	fmt.Fprintln(key, "format 2", k.release, modules, files)
	key.Write(initScript)
	key.Write(systemScript)
	for _, f := range files {
		if err := hashFile(key, tree, f); err != nil {
			return "", err
		}
	}
	if err := hashFile(key, k.dir, "vmlinuz"); err != nil { // another build of the release has other modules
		return "", err
	}
	image := filepath.Join(cache, "images", fmt.Sprintf("%s-%.8x.cpio", k.version, key.Sum(nil)))
	if _, err := os.Stat(image); err == nil {
		return image, nil
	}
	if err := os.MkdirAll(filepath.Dir(image), 0o755); err != nil {
		return "", fmt.Errorf("make image directory: %w", err)
	}
	root, err := os.MkdirTemp(filepath.Dir(image), "root-")
	if err != nil {
		return "", fmt.Errorf("make image directory: %w", err)
	}
	defer os.RemoveAll(root)
	if err := os.Chmod(root, 0o755); err != nil { // it becomes the guest's /
		return "", fmt.Errorf("make image directory: %w", err)
	}
	if err := stageTools(root, tree, files); err != nil {
		return "", fmt.Errorf("lay out image: %w", err)
	}
	if err := stageModules(ctx, root, k); err != nil {
		return "", fmt.Errorf("lay out modules of %s: %w", k.release, err)
	}
	err = writeFile(image, func(w io.Writer) error {
		a := archive{w: w}
		if err := a.tree(root, root); err != nil {
			return err
		}
		return a.end()
	})
	if err != nil {
		return "", fmt.Errorf("write image: %w", err)
	}
	return image, nil
}

// ownFiles go into each guest as this machine has them, which says nothing of a processor.
var ownFiles = []string{"/etc/protocols", "/etc/services"}

// toolFiles lists the files of a tree that go into the guest, and ownFiles, sorted.
func toolFiles(tree string, arch architecture) ([]string, error) {
	// iptables opens its extensions at run time.
	extensions, err := filepath.Glob(filepath.Join(tree, "usr/lib", arch.libraries, "xtables/*.so"))
	if err != nil {
		return nil, err
	}
	for i, e := range extensions {
		extensions[i] = filepath.Join("/", strings.TrimPrefix(e, tree))
	}
	libraries, err := arch.libraryFiles(tree, slices.Concat(tools, extensions))
	if err != nil {
		return nil, fmt.Errorf("list libraries of %v: %w", tools, err)
	}
	files := slices.Concat(tools, extensions, libraries, []string{"/usr/bin/busybox"}, ownFiles)
	slices.Sort(files)
	return slices.Compact(files), nil
}

// source is where a file of the guest is here.
func source(tree, file string) (string, error) {
	if slices.Contains(ownFiles, file) {
		return file, nil
	}
	return locate(tree, file)
}

func stageTools(root, tree string, files []string) error {
	for _, dir := range strings.Fields("bin sbin proc sys dev tmp run etc root test usr/sbin usr/bin lib64") {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			return err
		}
	}
	for _, f := range files {
		to := f
		if f == "/usr/bin/busybox" {
			to = "/bin/busybox"
		}
		from, err := source(tree, f)
		if err != nil {
			return err
		}
		if err := copyFile(filepath.Join(root, to), from); err != nil {
			return err
		}
	}
	links := map[string]string{"sbin/modprobe": "/bin/modprobe"}
	for _, name := range []string{"", "-save", "-restore"} {
		for _, family := range []string{"iptables", "ip6tables"} {
			links["usr/sbin/"+family+"-nft"+name] = "xtables-nft-multi"
			links["usr/sbin/"+family+"-legacy"+name] = "xtables-legacy-multi"
			links["usr/sbin/"+family+name] = "xtables-nft-multi" // Debian's choice
		}
	}
	for name, to := range links {
		if err := os.Symlink(to, filepath.Join(root, name)); err != nil {
			return err
		}
	}
	texts := map[string]string{
		"etc/passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
		"etc/group":  "root:x:0:\nnogroup:x:65534:\n",
		"etc/hosts":  "127.0.0.1 localhost\n::1 localhost\n",
	}
	for name, text := range texts {
		if err := os.WriteFile(filepath.Join(root, name), []byte(text), 0o644); err != nil {
			return err
		}
	}
	if err := os.WriteFile(filepath.Join(root, "system.sh"), systemScript, 0o644); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(root, "init"), initScript, 0o755)
}

// stageModules copies the wanted modules that this kernel does not have built
// in, decompressed, and indexes them.
func stageModules(ctx context.Context, root string, k kernel) error {
	from, to := filepath.Join(k.dir, "lib/modules", k.release), filepath.Join(root, "lib/modules", k.release)
	deps, err := readDeps(filepath.Join(from, "modules.dep"))
	if err != nil {
		return err
	}
	for _, file := range closure(deps, modules) {
		dst := filepath.Join(to, strings.TrimSuffix(file, ".xz"))
		if !strings.HasSuffix(file, ".xz") {
			err = copyFile(dst, filepath.Join(from, file))
		} else {
			err = decompress(ctx, dst, filepath.Join(from, file))
		}
		if err != nil {
			return err
		}
	}
	for _, index := range []string{"modules.builtin", "modules.builtin.modinfo"} {
		if err := copyFile(filepath.Join(to, index), filepath.Join(from, index)); err != nil {
			return err
		}
	}
	depmod := exec.CommandContext(ctx, "depmod", "-b", root, k.release)
	depmod.Env = append(os.Environ(), "PATH="+os.Getenv("PATH")+":/usr/sbin:/sbin")
	depmod.Path, err = lookSbin("depmod")
	if err != nil {
		return err
	}
	if out, err := depmod.CombinedOutput(); err != nil {
		return fmt.Errorf("depmod: %w: %s", err, out)
	}
	return nil
}

// readDeps reads modules.dep: the file of each module, and the files it needs.
func readDeps(name string) (map[string][]string, error) {
	text, err := os.ReadFile(name)
	if err != nil {
		return nil, err
	}
	deps := make(map[string][]string)
	lines := bufio.NewScanner(bytes.NewReader(text))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		file, needs, _ := strings.Cut(lines.Text(), ":")
		deps[moduleName(file)] = append([]string{file}, strings.Fields(needs)...)
	}
	return deps, lines.Err()
}

// closure returns the files of the named modules and all they need. A name that
// has no file is built in, or absent in this kernel; the self-test finds the latter.
func closure(deps map[string][]string, names []string) []string {
	var files []string
	for _, name := range names {
		files = append(files, deps[moduleName(name)]...)
	}
	slices.Sort(files)
	return slices.Compact(files)
}

func moduleName(file string) string {
	name, _, _ := strings.Cut(path.Base(file), ".ko")
	return strings.ReplaceAll(name, "-", "_")
}

func decompress(ctx context.Context, dst, src string) error {
	if err := os.MkdirAll(filepath.Dir(dst), 0o755); err != nil {
		return err
	}
	return writeFile(dst, func(w io.Writer) error {
		xz := exec.CommandContext(ctx, "xz", "-dc", src)
		xz.Stdout = w
		if err := xz.Run(); err != nil {
			return fmt.Errorf("xz -dc %s: %w", src, err)
		}
		return nil
	})
}

func copyFile(dst, src string) error {
	in, err := os.Open(src)
	if err != nil {
		return err
	}
	defer in.Close()
	info, err := in.Stat()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(dst), 0o755); err != nil {
		return err
	}
	err = writeFile(dst, func(w io.Writer) error {
		_, err := io.Copy(w, in)
		return err
	})
	if err != nil {
		return err
	}
	return os.Chmod(dst, info.Mode().Perm())
}

// writeFile makes name whole or not at all.
func writeFile(name string, body func(io.Writer) error) error {
	f, err := os.CreateTemp(filepath.Dir(name), "."+filepath.Base(name)+"-")
	if err != nil {
		return err
	}
	w := bufio.NewWriterSize(f, 1<<20)
	err = errors.Join(body(w), w.Flush(), f.Chmod(0o644), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), name)
	}
	if err != nil {
		return errors.Join(err, os.Remove(f.Name()))
	}
	return nil
}

func hashFile(h io.Writer, tree, file string) error {
	name, err := source(tree, file)
	if err != nil {
		return fmt.Errorf("%w: run hack/provision.sh vm", err)
	}
	f, err := os.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = io.Copy(h, f)
	return err
}

// lookSbin finds a program that Debian keeps out of a plain user's PATH.
func lookSbin(name string) (string, error) {
	if p, err := exec.LookPath(name); err == nil {
		return p, nil
	}
	for _, dir := range []string{"/usr/sbin", "/sbin"} {
		if p, err := exec.LookPath(filepath.Join(dir, name)); err == nil {
			return p, nil
		}
	}
	return "", fmt.Errorf("%s is not installed: run hack/provision.sh vm", name)
}
